"""Qwen3: tiny checkpoints against a forward pass in plain NumPy, its fusions, its shape, its mistakes, its text."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shaderlm
from shaderlm.bench.synthetic import MIXES, config_of, load_synthetic, parse
from shaderlm.engine import LanguageModel
from shaderlm.engine.loading import load_with
from shaderlm.errors import ModelError
from shaderlm.gpu import Device
from shaderlm.graph import interpret
from shaderlm.graph.batch import contiguous_batch
from shaderlm.graph.fuse import FUSIONS, fuse
from shaderlm.graph.graph import Graph
from shaderlm.graph.ops import label
from shaderlm.graph.reference import rope_table
from shaderlm.models.config import Rope, StepSpec
from shaderlm.models.shapes import SYNTHETIC, ModelShape
from shaderlm.models.supported import architecture
from shaderlm.runtime.gpu_runner import GpuRunner
from shaderlm.text import ChatTemplate, Tokenizer, Vocabulary

from . import test_kernels as kernels
from .architectures import TINY, model
from .cases import CASES, Case
from .qwen3_forward import F64, forward
from .session import Session
from .sweeps import by_default
from .test_fuse import distinct_fusions
from .test_models import assert_logits
from .tiers import runs_all
from .tiny_models import tiny_tokens, write_tiny_llama, write_tiny_qwen3

pytestmark = pytest.mark.xdist_group("tiny models")

IDS = [int(i) for i in np.random.default_rng(8).integers(0, 256, 40)]
# These models have neither GELU nor experts nor norms of what is added nor factors.
_ABSENT = (
    "gelu",
    "experts",
    "rms_norm_add",
    "rms_norm_mul_add",
    "embedding_scale",
    "short_conv",
    "delta",
    "rms_norm_silu",
    "sigmoid",
)
_LAST = "rms_norm_rope_attention_linear"  # it needs most of the others
NAMES = [f.name for f in FUSIONS if f.name != _LAST and not any(part in f.name for part in _ABSENT)]


# Tiny checkpoints ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny") / "qwen3.gguf", kind="q4_0")


@pytest.fixture(scope="module")
def expected(tiny: Path) -> F64:
    return forward(tiny, IDS)


@pytest.fixture(scope="module")
def on_cpu(tiny: Path) -> Iterator[LanguageModel]:
    with shaderlm.load(tiny, device="cpu", precision="exact") as model:
        yield model


@pytest.fixture(scope="module")
def on_gpu(tiny: Path, device: Device) -> Iterator[LanguageModel]:
    with load_with(tiny, device=device, cache="f32", precision="exact") as model:
        yield model


def test_logits_are_those_of_the_forward_pass(on_cpu: LanguageModel, on_gpu: LanguageModel, expected: F64) -> None:
    assert expected.std() > 0.1
    assert_logits(on_cpu.logits(IDS), expected, 1e-5, "the interpreter")
    assert_logits(on_gpu.logits(IDS), expected, 2e-4, "the GPU")
    assert on_cpu.report.architecture == "qwen3"


@pytest.mark.parametrize("wrong", [{"head_norms": False}, {"halves": False}], ids=lambda wrong: next(iter(wrong)))
def test_the_comparison_would_notice(wrong: dict[str, bool], tiny: Path, expected: F64) -> None:
    """A model without norms of heads, or with rope's other pairs, has other logits."""
    assert np.abs(forward(tiny, IDS[:12], **wrong) - expected[:12]).max() > 1e-2


@pytest.mark.long  # test_models has them too
@pytest.mark.parametrize("kind", ["f32", "f16", "q8_0", "q4_k"])
def test_formats(kind: str, tmp_path: Path, device: Device) -> None:
    path = write_tiny_qwen3(tmp_path / f"{kind}.gguf", kind=kind, layers=1)
    expected = forward(path, IDS[:9])
    with shaderlm.load(path, device="cpu", precision="exact") as model:
        assert_logits(model.logits(IDS[:9]), expected, 1e-4, f"{kind} in the interpreter")
    with load_with(path, device=device, cache="f32", precision="exact") as model:
        assert_logits(model.logits(IDS[:9]), expected, 5e-4, f"{kind} on the GPU")
        assert_logits(model.logits(IDS[:1]), expected[:1], 5e-4, f"{kind} on the GPU, one row")


@pytest.mark.parametrize("on", ["cpu", "gpu"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_decode_is_prefill(chunk: int, on: str, on_cpu: LanguageModel, on_gpu: LanguageModel, expected: F64) -> None:
    session = Session((on_cpu if on == "cpu" else on_gpu)._runner)
    try:
        for first in range(0, len(IDS), chunk):
            found = session.logits(IDS[first : first + chunk])
            last = min(first + chunk, len(IDS)) - 1
            assert_logits(found, expected[last], 5e-4, f"row {last} in chunks of {chunk} on {on}")
    finally:
        session.close()


def test_greedy_answers(tiny: Path, on_cpu: LanguageModel, on_gpu: LanguageModel) -> None:
    ids = IDS[:5]
    for _ in range(6):
        ids = [*ids, int(forward(tiny, ids)[-1].argmax())]
    for on in (on_cpu, on_gpu):
        assert on.generate(IDS[:5], max_tokens=6, ignore_eos=True).ids == ids[5:]


# Fusions -------------------------------------------------------------------------------------------------


def build(rows: int = 3, **options: Any) -> Graph:
    made, config = model(name="qwen3", **options)
    return made.build(config, StepSpec(rows))


def labels(graph: Graph) -> Counter[str]:
    return Counter(label(node.op, node.dims) for node in graph.nodes)


def values(graph: Graph, rows: int) -> dict[str, Any]:
    """A batch, random weights (by part, so that fused and unfused graphs get the same) and empty caches."""

    def part(name: str, shape: tuple[int, ...]) -> Any:
        seed = sum(map(ord, name)) * 7919 % 2**32
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / 8

    found: dict[str, Any] = {"batch": contiguous_batch(2, rows, np.arange(rows) * 7 % TINY[-1])}
    found |= {"tokens": np.zeros(1, np.uint32), "page_table": np.zeros(1, np.uint32)}
    found["rope_table"] = rope_table(np.arange(8), TINY[4]).astype(np.float32)
    for tensor in graph.tensors.values():
        if tensor.role == "weight":
            pieces = [part(each.name, (each.rows, *tensor.shape[1:])) for each in tensor.parts]
            whole = np.stack(pieces, axis=1) if tensor.interleaved else np.concatenate(pieces)
            found[tensor.name] = whole.reshape(tensor.shape)
        elif tensor.role == "state":  # two positions are there already
            found[tensor.name] = part(tensor.name, (8, *tensor.shape[1:]))
    return found


def test_a_layer_becomes_five_nodes() -> None:
    """As many dispatches as a llama's: norms of heads, rope, and the write of keys and values belong to attention."""
    graph, rejected = fuse(build(rows=1))
    layers = TINY[0]
    assert rejected == ()
    assert labels(graph) == {
        "embedding": 1,
        "rms_norm+linear": layers,
        "rms_norm_rope_attention_linear+add": layers,  # the columns of one product; two dispatches
        "linear+add": layers,
        "rms_norm+linear+silu_mul": layers,
    }


@pytest.mark.parametrize("rows", [1, 3])
def test_every_subset_of_fusions_computes_the_same(rows: int) -> None:
    graph = build(rows)
    given = values(graph, rows)
    caches = [name for name, tensor in graph.tensors.items() if tensor.role == "state"]
    expected = interpret.run(graph, given)["hidden"]
    assert np.abs(expected).max() > 0.1
    subsets = [s for n in range(1, len(NAMES) + 1) for s in itertools.combinations(NAMES, n)]
    for subset, fused in distinct_fusions(graph, (*subsets[:: 1 if runs_all() else 3], (*NAMES, _LAST))):
        mine = values(fused, rows)
        np.testing.assert_allclose(interpret.run(fused, mine)["hidden"], expected, atol=1e-5, err_msg=str(subset))
        for name in caches:
            np.testing.assert_allclose(mine[name], given[name], atol=1e-5, err_msg=f"{name}, {subset}")


@pytest.mark.parametrize("fusions", [(), *[(fusion.name,) for fusion in FUSIONS], ("rms_norm_mul", "rope_kv_write")])
def test_fused_is_unfused_on_the_gpu(fusions: tuple[str, ...], tiny: Path, device: Device, expected: F64) -> None:
    with load_with(tiny, device=device, fusions=fusions, cache="f32", precision="exact") as model:
        assert_logits(model.logits(IDS[:6]), expected[:6], 2e-4, f"{fusions}, 6 rows")
        assert_logits(model.logits(IDS[:1]), expected[:1], 2e-4, f"{fusions}, one row")


def test_formats_that_differ_are_merged_where_they_can_be() -> None:
    graph, rejected = fuse(build(formats={"attn_v": "f16"}))
    assert labels(graph)["rms_norm+linear"] == 2 * TINY[0]  # q and k, v
    assert {rejection.fusion for rejection in rejected} == {"linear_merge"}
    assert "attn_v.weight is f16" in rejected[0].reason


def test_halves_that_are_no_quads_keep_their_rope(tmp_path: Path, device: Device) -> None:
    path = write_tiny_qwen3(tmp_path / "narrow.gguf", heads=8, head_width=12)
    expected = forward(path, IDS[:6])
    with load_with(path, device=device, cache="f32", precision="exact") as model:
        assert isinstance(model._runner, GpuRunner)
        graph, rejected = model._runner.graph(StepSpec(1))
        assert labels(graph)["rope"] == 4
        assert "rotary % 8 must be 0" in next(r.reason for r in rejected if r.fusion == "rope_kv_write")
        assert_logits(model.logits(IDS[:6]), expected, 2e-4, "heads of 12")


# The shape of Qwen3-0.6B ---------------------------------------------------------------------------------

QWEN3 = SYNTHETIC["qwen3-0.6b"]
# What its matrices and heads are cut into on a large GPU, and no model before it had.
HEADS = (("Hq", 16), ("Hkv", 8), ("D", 128))
OWN = [
    *(
        Case("linear", (("tokens", 1), ("K", K), ("N", N), ("format", "q4_0"), ("epilogue", epilogue)))
        for K, N, epilogue in ((1056, 6150, "none"), (3104, 1030, "none"), (3104, 1030, "silu_mul"))
    ),
    *(
        Case("attention", (*HEADS, ("tokens", 1), ("keys", keys), ("cache", cache)))
        for keys, caches in (
            (1, ["f32"]),
            (128, ["f32"]),
            (130, ["f32", "f16"]),
            (1024, ["f32"]),
            (4100, ["f32", "f16"]),
        )
        for cache in caches
    ),
    *(  # a prompt beside rows of every length
        Case("attention", (*HEADS, ("tokens", tokens), ("context", context), ("paged", True)), stretches)
        for tokens, context, stretches in (
            (24, "split", ((0, 590, 9), (1, 700, 1), (2, 11, 1), (3, 500, 9))),
            (12, "long_split", ((0, 2100, 8), (1, 40, 1), (2, 2500, 1))),
        )
    ),
    Case("rms_norm_mul", (("tokens", 1), ("heads", 16), ("width", 128))),
    Case("rms_norm_mul", (("tokens", 3), ("heads", 8), ("width", 128), ("batched", True))),
    Case(
        "rope_kv_write",
        (("tokens", 3), *HEADS, ("v_first", 3072), ("v_stride", 4096)),
    ),
]


# Those of attention, and the large ones, take 5 to 20 s in software each.
@pytest.mark.parametrize(
    "case",
    by_default(OWN, lambda case: case.op != "attention" and case.flops <= 500_000),
    ids=[each.name for each in OWN],
)
def test_its_kernels_match_the_reference(
    case: Case, device: Device, plain_device: Device, pytestconfig: pytest.Config
) -> None:
    kernels.test_routes_match_the_reference(case, device, plain_device, pytestconfig)


def test_what_it_launches_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CASES", [*CASES, *OWN])
    kernels.test_what_a_model_launches_is_tested(QWEN3)


@pytest.mark.parametrize("mix", MIXES)
def test_a_synthetic_one(mix: str) -> None:
    shape, found = parse(f"synthetic:qwen3-0.6b:{mix}")
    assert (shape, found) == (QWEN3, mix)
    kind, config = config_of(shape, mix)
    assert (config.architecture, config.context, config.eps) == ("qwen3", 40960, 1e-6)
    assert config.rope == Rope(128, 1e6, interleaved=False)
    assert config.shapes["blk.27.attn_q.weight"] == (2048, 1024)
    assert config.shapes["blk.27.attn_output.weight"] == (1024, 2048)
    assert config.shapes["blk.27.attn_k_norm.weight"] == (128,)
    assert sum(int(np.prod(size)) for size in config.shapes.values()) == 596_049_920
    assert config.formats["blk.0.attn_q_norm.weight"] == "f32"
    assert config.formats["blk.9.attn_q.weight"] == {"q4_k_m": "q4_k", "mxfp4_moe": "q8_0"}.get(mix, mix)
    assert kind.build(config, StepSpec(1)).tensors["hidden"].shape == (1, 1024)
    assert kind.head(config, 1, 1).tensors["logits"].shape == (1, 151936)


def test_synthetic_weights_make_logits(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ModelShape("small", 2, 256, 4, 2, 128, 512, 300, tied=True, architecture="qwen3")
    monkeypatch.setitem(SYNTHETIC, "small", small)
    made = {}
    for on in ("cpu", device):
        model = load_synthetic("synthetic:small:q8_0", on)
        runner, report = model.runner, model.report
        session = Session(runner)
        made[report.device] = session.logits(list(range(20)))
        session.close()
        assert report.architecture == "qwen3"
    assert len(made) == 2
    for logits in made.values():
        assert np.isfinite(logits).all()
        assert 0.1 < logits.std() < 10


# Mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"qwen3.block_count": 3}}, "no tensor 'blk.2.attn_q.weight'"),
        ({"metadata": {"qwen3.embedding_length": None}}, "qwen3.embedding_length must be a whole number"),
        ({"metadata": {"qwen3.attention.head_count_kv": 3}}, "qwen3.attention.head_count must be a multiple"),
        ({"metadata": {"qwen3.attention.value_length": 16}}, "qwen3.attention.value_length differs"),
        ({"metadata": {"qwen3.attention.key_length": 16, "qwen3.attention.value_length": 16}},
         r"'blk.0.attn_q.weight' must be \[64, 64\] by the metadata, it is \[128, 64\]"),
        ({"metadata": {"qwen3.attention.layer_norm_rms_epsilon": None}}, "must be a number above 0, the file has not"),
        ({"metadata": {"qwen3.rope.scaling.type": "su"}}, "qwen3.rope.scaling.type is 'su'"),
        ({"metadata": {"qwen3.rope.freq_base": -1.0}}, "qwen3.rope.freq_base must be a number above 0"),
        ({"metadata": {"qwen3.expert_count": 8}}, "qwen3.expert_count is 8: the feed-forward network consists of exp"),
        ({"metadata": {"general.architecture": "qwen9"}}, "is 'qwen9'; supported: .*qwen3"),
        ({"tensors": {"blk.1.attn_k_norm.weight": np.ones(64, np.float32)}}, r"'blk.1.attn_k_norm.weight' must be \["),
        ({"tensors": {"blk.1.attn_q.weight": np.ones((64, 64), np.float32)}}, r"'blk.1.attn_q.weight' must be \[128"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_contradicts_itself_is_refused(options: Any, message: str, tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "wrong.gguf", **options)
    with pytest.raises(ModelError, match=message) as caught:
        shaderlm.load(path, device="cpu")
    assert len(str(caught.value).splitlines()) == 1


def test_the_norms_of_heads_must_be_there(tmp_path: Path) -> None:
    shape = ModelShape("tiny", 2, 64, 4, 2, 16, 96, len(tiny_tokens()), tied=True, architecture="qwen3")
    path = write_tiny_llama(tmp_path / "llama.gguf", metadata=shape.metadata)
    with pytest.raises(ModelError, match=r"no tensor 'blk.0.attn_q_norm.weight': it is incomplete"):
        shaderlm.load(path, device="cpu")


def test_an_architecture_is_found_by_its_name() -> None:
    with pytest.raises(ModelError, match=r"is 'dense'; supported: (?!.* dense,)"):
        architecture({"general.architecture": "dense"})
    for name in ("llama", "qwen3"):
        assert architecture({"general.architecture": name}).name == name


# Text ----------------------------------------------------------------------------------------------------


def words(pre: str, text: str) -> list[str]:
    tokens = [*tiny_tokens(), "12", "'T"]
    types = [1] * len(tokens)
    metadata = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": ["1 2", "' T"], "token_type": types}
    vocabulary = Vocabulary.from_metadata({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    return [tokens[i] for i in Tokenizer(vocabulary).encode(text)]


def test_words_of_qwen2() -> None:
    """Qwen3's files name this one: digits stand alone, and contractions are cut off in any case."""
    assert words("qwen2", "N'T12") == ["N", "'T", "1", "2"]
    assert words("gpt-2", "N'T12") == ["N", "'", "T", "12"]
    assert words("llama-bpe", "N'T12") == ["N", "'T", "12"]


def test_templates_that_know_of_thinking() -> None:
    """What Qwen3's own one does: walks backwards, keeps state, cuts old thoughts, asks for a switch nobody gave."""
    source = """
{%- set state = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if state.last < 0 and message.role == 'user' and message.content is string %}
        {%- set state.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < state.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n1"},
        {"role": "user", "content": "two"},
    ]
    turns = [("user", "one"), ("assistant", "1"), ("user", "two")]
    said = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert ChatTemplate(source).render(messages) == said + "<|im_start|>assistant\n"
