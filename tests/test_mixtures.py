"""Models with experts: tiny checkpoints against a forward pass in plain NumPy, fused and not, in NumPy and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from shaderlm.errors import ModelError
from shaderlm.gpu import Device
from shaderlm.graph.fuse import FUSIONS
from shaderlm.models.config import StepSpec
from shaderlm.runtime.runner import Runner, SequenceChunk

from .changed import in_memory, logits
from .qwen3_forward import F64, attend, norm, turn
from .runners import runner_of

HIDDEN, HEADS, KV_HEADS, WIDTH, EXPERTS, USED, FFN, SHARED, VOCABULARY = 64, 4, 2, 16, 5, 2, 32, 96, 70
IDS = [int(i) for i in np.random.default_rng(3).integers(0, VOCABULARY, 12)]
ARCHITECTURES = ("llama", "qwen2moe", "qwen3moe")


def write_mixture(
    path: Path, name: str, kind: str = "f32", one_row: int = False, shared: int = SHARED, **metadata: int
) -> Path:
    """A checkpoint of one of these architectures; the matrices of its experts are of this kind.

    one_row: vectors are matrices of one row, as some converters write them. shared: width of the shared network, which
    is of that kind too if it is as wide as an expert.
    """
    writer = gguf.GGUFWriter(path, name)
    numbers = {"block_count": 2, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": FFN}
    numbers |= {"attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": WIDTH}
    numbers |= {"attention.value_length": WIDTH, "expert_count": EXPERTS, "expert_used_count": USED}
    if name != "llama":
        numbers |= {"feed_forward_length": 999, "expert_feed_forward_length": FFN}
    if name == "qwen2moe":
        numbers["expert_shared_feed_forward_length"] = shared
    for key, value in (numbers | metadata).items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(2):
        layer: dict[str, tuple[int, ...]] = dict.fromkeys(("attn_norm", "ffn_norm"), (HIDDEN,))
        layer |= {"attn_q": (HEADS * WIDTH, HIDDEN), "attn_output": (HIDDEN, HEADS * WIDTH)}
        layer |= dict.fromkeys(("attn_k", "attn_v"), (KV_HEADS * WIDTH, HIDDEN))
        layer |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (EXPERTS, FFN, HIDDEN))
        layer |= {"ffn_down_exps": (EXPERTS, HIDDEN, FFN), "ffn_gate_inp": (EXPERTS, HIDDEN)}
        if name == "qwen3moe":
            layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (WIDTH,))
        if name == "qwen2moe":
            layer |= dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (shared, HIDDEN))
            layer |= {"ffn_down_shexp": (HIDDEN, shared), "ffn_gate_inp_shexp": (HIDDEN,)}
        shapes |= {f"blk.{i}.{key}": shape for key, shape in layer.items()}
    rng = np.random.default_rng(11)
    for key, shape in shapes.items():
        dense: NDArray[Any] = rng.standard_normal(shape, np.float32)
        if key.endswith("norm"):
            dense = 1 + dense / 10
        elif len(shape) > 1:
            dense = dense * np.float32(1.5 / np.sqrt(shape[-1]))
        if one_row and dense.ndim == 1:
            dense = dense[None]
        alike = shared == FFN and key.endswith("_shexp") and "_inp_" not in key
        form = gguf.GGMLQuantizationType[kind.upper() if alike or key.endswith("_exps") else "F32"]
        writer.add_tensor(f"{key}.weight", gguf.quants.quantize(dense, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS = ("gate", "up", "down")


def _network(w: dict[str, F64], x: F64) -> F64:
    gate = w["gate"] @ x
    return np.asarray(w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ x)))


def forward(path: Path, name: str, ids: list[int]) -> F64:
    """Logits [T, vocabulary], token by token and expert by expert, without any code of the package."""
    tensors = gguf.GGUFReader(path).tensors
    weights = {t.name: np.asarray(gguf.quants.dequantize(t.data, t.tensor_type), np.float64) for t in tensors}
    cache: dict[tuple[int, int], tuple[list[F64], list[F64]]] = {(i, h): ([], []) for i in (0, 1) for h in (0, 1)}
    logits = []
    for position, token in enumerate(ids):
        x = weights["token_embd.weight"][token]
        for i in range(2):
            w = {key.split(".")[2]: value for key, value in weights.items() if key.startswith(f"blk.{i}.")}
            h = norm(x, w["attn_norm"], 1e-5)
            turned = {}
            for key, count in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
                split = list((w[key] @ h).reshape(count, WIDTH))
                if name == "qwen3moe":
                    split = [norm(head, w[f"{key}_norm"], 1e-5) for head in split]
                turned[key] = [turn(head, position, 10000.0, name != "llama") for head in split]
            values = (w["attn_v"] @ h).reshape(KV_HEADS, WIDTH)
            for head in range(KV_HEADS):
                cache[i, head][0].append(turned["attn_k"][head])
                cache[i, head][1].append(values[head])
            seen = [attend(q, *cache[i, head * KV_HEADS // HEADS]) for head, q in enumerate(turned["attn_q"])]
            x = x + w["attn_output"] @ np.concatenate(seen)
            h = norm(x, w["ffn_norm"], 1e-5)
            powers = np.exp(w["ffn_gate_inp"] @ h)
            chosen = np.argsort(-powers)[:USED]
            total = powers.sum() if name == "qwen2moe" else powers[chosen].sum()
            y = np.zeros(HIDDEN)
            for e in chosen:
                y += powers[e] / total * _network({part: w[f"ffn_{part}_exps"][e] for part in PARTS}, h)
            if name == "qwen2moe":
                shared = _network({part: w[f"ffn_{part}_shexp"] for part in PARTS}, h)
                y += shared / (1 + np.exp(-(w["ffn_gate_inp_shexp"] @ h)))
            x = x + y
        logits.append(weights["token_embd.weight"] @ norm(x, weights["output_norm.weight"], 1e-5))
    return np.array(logits)


def last_logits(runner: Runner, ids: list[int], chunks: tuple[int, ...]) -> NDArray[np.float32]:
    """Those of the last token, of a prompt in chunks."""
    sequence, at, found = runner.add(), 0, None
    for count in chunks:
        found = runner.step([SequenceChunk(sequence, ids[at : at + count], "logits")])
        at += count
    assert at == len(ids)
    assert found is not None
    assert found.logits is not None
    last: NDArray[np.float32] = found.logits[-1]
    return last


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_logits_in_numpy(name: str, kind: str, tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "mixture.gguf", name, kind)
    expected = forward(path, name, IDS)[-1]
    for fusions in (None, ()):
        for chunks in ((12,), (5, 1, 6)):
            found = last_logits(runner_of(path, None, fusions=fusions), IDS, chunks)
            np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(("kind", "one_row"), [("f32", False), ("q4_0", False), ("q4_0", True)])
def test_a_shared_network_as_wide_as_an_expert_is_one(kind: str, one_row: bool, tmp_path: Path) -> None:
    """One more for every row, whose gate is a row of the router. Wider ones stay what they are, and it is said why."""
    path = write_mixture(tmp_path / "mixture.gguf", "qwen2moe", kind, one_row, shared=FFN)
    fusions = [fusion.name for fusion in FUSIONS]
    runner = runner_of(path, None, fusions=fusions)
    graph, _ = runner.graph(StepSpec(3))
    assert {node.dims["experts"] for node in graph.nodes if node.op == "linear_experts"} == {EXPERTS + 1}
    assert all(node.op != "add_gated" for node in graph.nodes)
    plain = write_mixture(tmp_path / "plain.gguf", "qwen2moe", kind, shared=FFN)
    expected = forward(plain, "qwen2moe", IDS)[-1]
    found = last_logits(runner, IDS, (5, 1, 6))
    np.testing.assert_allclose(found, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    wider = runner_of(write_mixture(tmp_path / "wider.gguf", "qwen2moe", kind), None, fusions=fusions)
    reasons = {each.reason for each in wider.graph(StepSpec(3))[1] if each.fusion == "experts_shared"}
    assert reasons == {f"32 × 64 of f32 and {SHARED} × 64 of f32 are not alike"}


@pytest.mark.parametrize("name", ["qwen35moe", "glm4moe", "lfm2moe"])
def test_gate_and_up_of_all_experts_in_one_matrix(name: str) -> None:
    """Converters write it so if they are told to, of any mixture."""
    file, tensors = in_memory(name), dict[str, NDArray[np.float32] | None]()
    for gate in [each for each in file.tensors if each.endswith(".ffn_gate_exps.weight")]:
        up, joint = (gate.replace("_gate_", between) for between in ("_up_", "_gate_up_"))
        tensors |= {gate: None, up: None, joint: np.concatenate([file.arrays[gate], file.arrays[up]], axis=1)}
    assert tensors
    np.testing.assert_array_equal(logits(file.changed(tensors=tensors)), logits(file))


def test_vectors_may_be_matrices_of_one_row(tmp_path: Path) -> None:
    """As in files of Qwen1.5-MoE and Qwen2-57B-A14B."""
    plain, rows = (write_mixture(tmp_path / f"{one}.gguf", "qwen2moe", one_row=one) for one in (False, True))
    found = [last_logits(runner_of(path, None), IDS, (12,)) for path in (plain, rows)]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.long
@pytest.mark.parametrize(("name", "shared"), [*((name, SHARED) for name in ARCHITECTURES), ("qwen2moe", FFN)])
def test_logits_on_a_gpu(name: str, shared: int, tmp_path: Path, device: Device) -> None:
    path = write_mixture(tmp_path / "mixture.gguf", name, "q4_0", shared=shared)
    expected = forward(path, name, IDS)[-1]
    unfused = [fusion.name for fusion in FUSIONS if fusion.name != "experts_silu_mul"]
    for fusions in (None, unfused):
        found = last_logits(runner_of(path, device, fusions=fusions, cache="f32", precision="exact"), IDS, (8, 1, 3))
        np.testing.assert_allclose(found, expected, atol=2e-4 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_used_count": 6}, "expert_used_count must be at most expert_count=5"),
        ({"expert_count": 4}, "must be"),
        ({"expert_feed_forward_length": 64}, "must be"),
        ({"expert_shared_count": 1}, "experts"),
        ({"expert_group_count": 2}, "experts"),
    ],
)
def test_files_that_are_refused(metadata: dict[str, int], message: str, tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "mixture.gguf", "qwen3moe", "f32", **metadata)
    with pytest.raises(ModelError, match=message):
        runner_of(path, None)
