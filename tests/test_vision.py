"""Models that see: what `transformers` gives for them, from folders and from GGUF files, alone and together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from shaderlm.compile.lowering import Lowering
from shaderlm.engine import LanguageModel, driver
from shaderlm.engine.drafts import Drafts, NgramDrafter
from shaderlm.engine.loading import load, load_with
from shaderlm.errors import InputError
from shaderlm.formats.hf.towers import open_folder_tower
from shaderlm.formats.vision_files import VisionFile, open_mmproj
from shaderlm.gpu.pipelines import key_of
from shaderlm.graph import interpret
from shaderlm.graph.batch import PAGE
from shaderlm.graph.fuse import fuse
from shaderlm.models.vision import Tower, read_tower, tower_inputs
from shaderlm.runtime import gpu_tower
from shaderlm.runtime.device_features import DeviceFeatures
from shaderlm.runtime.tower import NumpyTower, TowerSource
from shaderlm.runtime.weights import dense
from shaderlm.vision import open_picture

from .checkpoints import write_entries
from .command_line import shaderlm
from .vision_oracles import IMAGE_TOKENS, NAMES, SOURCES, VisionOracle

pytest.importorskip("PIL", reason="Pillow is in the extra `vision`")
pytestmark = pytest.mark.xdist_group("test_vision")
_GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
FURTHER = [name for name in NAMES if name != "qwen3vl"]  # in the full tier
_LONG = {**_GREEDY, "max_tokens": 40}
# What a feature may be off by. The projector of Gemma 3 is f16 in GGUF files.
_ERRORS = {("gemma3-vision", "model.gguf"): 2e-3}


def _open(oracle: VisionOracle, source: str) -> tuple[VisionFile, Tower]:
    file = open_folder_tower(oracle.folder / "hf") if source == "hf" else open_mmproj(oracle.folder / "mmproj.gguf")
    assert file is not None
    formats = dict.fromkeys(file.shapes, "f32")
    return file, read_tower(file.metadata, file.shapes, formats, IMAGE_TOKENS.get(oracle.folder.name))


def _messages(oracle: VisionOracle, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a case, with its pictures."""
    pictures, messages = iter(oracle.pictures(case)), deepcopy(case["messages"])
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = next(pictures)
    return list(messages)


def _load(oracle: VisionOracle, source: str, device: Any, **options: Any) -> LanguageModel:
    tokens = IMAGE_TOKENS.get(oracle.folder.name)
    return load_with(oracle.folder / source, device=device, precision="exact", image_tokens=tokens, **options)


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_pixels_and_features(name: str, source: str, vision_oracles: dict[str, VisionOracle]) -> None:
    """Pixels are those of the processor to the bit, of features the first and last are compared for all pictures."""
    oracle = vision_oracles[name]
    file, tower = _open(oracle, source)
    runner = NumpyTower(tower, TowerSource(file, tower))
    for number, case in enumerate(oracle.cases):
        pictures = [open_picture(path) for path in oracle.pictures(case)]
        layouts = [tower.processor.layout(each.width, each.height) for each in pictures]
        rows = [runner.patches(picture.pixels, each) for picture, each in zip(pictures, layouts, strict=True)]
        made = np.concatenate([runner.features(*each) for each in zip(rows, layouts, strict=True)])
        wanted = oracle.arrays[f"features-{number}"]
        assert np.abs(made[:, : wanted.shape[1]] - wanted).max() < _ERRORS.get((name, source), 1e-5)
        moments = 2 if name == "qwen3vl" else 1  # a picture is the same twice
        total = case["pixel_values"]["sum"] / moments
        assert abs(sum(float(each.astype(np.float64).sum()) for each in rows) - total) < 1e-2
        if (pixels := oracle.arrays.get(f"pixels-{number}")) is not None:
            width = 3 * tower.patch**2
            np.testing.assert_allclose(rows[0][:, :width], _in_patches(pixels, tower), atol=1e-6)
    file.close()


@pytest.mark.parametrize(
    ("name", "op"), [("qwen3vl", "slice_rope_by_row_attend_spans"), ("gemma3-vision", "slice_attend_spans")]
)
def test_queries_keys_and_values_are_read_from_one_product(
    name: str, op: str, vision_oracles: dict[str, VisionOracle]
) -> None:
    """No tensor is made of each of them, and the features are the same."""
    file, tower = _open(vision_oracles[name], "hf")
    layout = tower.processor.layout(32, 32)
    graph = tower.build(layout.patches)
    fused, _ = fuse(graph)
    assert [node.op for node in fused.nodes if node.op == "slice" or node.op.endswith("spans")] == [op] * tower.layers
    inputs: dict[str, Any] = {**tower_inputs(tower, layout)}
    inputs["patches"] = np.random.default_rng(1).standard_normal((layout.patches, tower.patch_width), np.float32)
    found = [
        interpret.run(each, {**dense(each.weights(), TowerSource(file, tower)), **inputs}) for each in (graph, fused)
    ]
    file.close()
    for key in graph.outputs:
        np.testing.assert_allclose(found[1][key], found[0][key], atol=1e-4)


def _in_patches(pixels: Any, tower: Tower) -> Any:
    """What the processor gives, as rows of patches."""
    if pixels.ndim == 2:  # of two moments
        return pixels.reshape(len(pixels), 3, 2, -1)[:, :, 0].reshape(len(pixels), -1)
    m, p = tower.merge, tower.patch
    tiles = pixels.reshape(-1, 3, *pixels.shape[-2:])
    grid = tiles.shape[-1] // p // m
    cut = tiles.reshape(len(tiles), 3, grid, m, p, grid, m, p).transpose(0, 2, 5, 3, 6, 1, 4, 7)
    return cut.reshape(-1, 3 * p * p)


@pytest.fixture(scope="module", params=SOURCES, ids="-".join)
def seeing(request: pytest.FixtureRequest, vision_oracles: dict[str, VisionOracle]) -> Iterator[tuple[Any, Any]]:
    """An oracle, and its model in NumPy."""
    name, source = request.param
    with _load(vision_oracles[name], source, "numpy") as model:
        yield vision_oracles[name], model


def test_a_fork_goes_on_where_its_parent_is(seeing: tuple[VisionOracle, LanguageModel]) -> None:
    """At positions that images before it have shifted."""
    _, model = seeing
    runner = model.runner
    parent = runner.add()
    runner.feed(parent, [3, 4, 5, 6])
    parent.shift = -2
    child = runner.fork(parent)
    rows = [runner.feed(sequence, [7], "logits").logits for sequence in (parent, child)]
    assert rows[0] is not None
    assert rows[1] is not None
    assert rows[0].tobytes() == rows[1].tobytes()
    runner.free(parent)
    runner.free(child)


def test_greedy_ids(seeing: tuple[VisionOracle, LanguageModel]) -> None:
    """Prompts have the ids of the processor; what follows them is the same, again from the cache, and all at once."""
    oracle, model = seeing
    conversations = [_messages(oracle, case) for case in oracle.cases]
    alone = [model.chat(messages, **_GREEDY) for messages in conversations]
    for case, first in zip(oracle.cases, alone, strict=True):
        assert first.prompt_ids == case["ids"]
        assert first.ids == case["greedy"]
    model.chat(conversations[0], **_GREEDY)  # others took the place of its pages
    again = model.engine.submit(model.chat_request(conversations[0], **_GREEDY))
    again.result()
    assert again.usage.cached_tokens == len(oracle.cases[0]["ids"]) - 1
    assert again.usage.image_tokens == oracle.cases[0]["features"]["shape"][0]
    text = [{"role": "user", "content": "what is in the street?"}]
    plain = model.chat(text, **_GREEDY)
    together = model.chat([text, *conversations], cache_prompt=False, **_GREEDY)
    assert [each.ids for each in together] == [plain.ids, *(each.ids for each in alone)]


def test_a_mixture_sees(vision_oracles: dict[str, VisionOracle], tmp_path: Path) -> None:
    """Qwen3-VL with experts and an mmproj file. All experts are the dense network, so that the text is the same."""
    oracle, dense = vision_oracles["qwen3vl"], GGUFReader(vision_oracles["qwen3vl"].folder / "model.gguf")
    metadata = {
        key.replace("qwen3vl.", "qwen3vlmoe."): field.contents()
        for key, field in dense.fields.items()
        if not key.startswith("GGUF.") and key != "general.architecture"
    }
    own = {"expert_count": 3, "expert_used_count": 2}
    own["expert_feed_forward_length"] = metadata["qwen3vlmoe.feed_forward_length"]
    metadata |= {f"qwen3vlmoe.{key}": value for key, value in own.items()}
    tensors = {}
    for each in dense.tensors:
        block, _, rest = each.name.partition(".ffn_")
        if rest in ("gate.weight", "up.weight", "down.weight"):
            tensors[f"{block}.ffn_{rest.replace('.', '_exps.')}"] = np.stack([each.data] * 3)
            router = np.random.default_rng(len(tensors)).normal(size=(3, metadata["qwen3vlmoe.embedding_length"]))
            tensors[f"{block}.ffn_gate_inp.weight"] = router.astype(np.float32)
        else:
            tensors[each.name] = each.data
    write_entries(tmp_path / "model.gguf", "qwen3vlmoe", metadata, tensors)
    (tmp_path / "mmproj.gguf").write_bytes((oracle.folder / "mmproj.gguf").read_bytes())
    with load_with(
        tmp_path / "model.gguf", device="numpy", precision="exact", image_tokens=IMAGE_TOKENS["qwen3vl"]
    ) as model:
        assert model.vision is not None
        for case in oracle.cases[:2]:
            found = model.chat(_messages(oracle, case), **_GREEDY)
            assert (found.prompt_ids, found.ids) == (case["ids"], case["greedy"])


def test_a_conversation_without_images_is_shown(vision_oracles: dict[str, VisionOracle]) -> None:
    """Also by the template of SmolVLM, which takes every content for a list of parts."""
    for name in NAMES:
        with _load(vision_oracles[name], "hf", "numpy") as model:
            for content in ("see the dog", [{"type": "text", "text": "see the dog"}]):
                ids = model.chat_ids([{"role": "user", "content": content}])
                assert "see the dog" in model.detokenize(ids)


def _with_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """With more text in the first message."""
    first, *others = messages
    parts = [{**part, "text": part["text"] + text} if part["type"] == "text" else part for part in first["content"]]
    return [{**first, "content": parts}, *others]


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["qwen3vl", *(pytest.param(name, marks=pytest.mark.full) for name in FURTHER)])
def test_preemption_and_a_client_that_leaves(
    name: str, vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with and without pictures, in a cache too small for all, while one leaves as its picture is encoded."""
    oracle = vision_oracles[name]
    with _load(oracle, "hf", "numpy") as model:
        text: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "see"}]}]
        conversations = [*(_messages(oracle, case) for case in oracle.cases[:2]), text]
        for messages in conversations:  # each begins in a page, and ends in another
            words, short = "", messages[:]
            while len(model.chat_request(messages, **_LONG).prompt_ids) < PAGE - 20:
                words += " what"
                assert len(words) < 5 * PAGE
                messages[:] = _with_text(short, words)
        alone = [model.chat(messages, cache_prompt=False, **_LONG).ids for messages in conversations]
        model.engine.configure(replace(model.engine.options, cache_tokens=3 * PAGE))
        assert model.vision is not None
        runner, known = model.vision.runner, Event()
        encode, pixels = runner.encode, np.full((32, 32, 3), 77, np.uint8)

        def leaves(picture: Any, layout: Any) -> Any:
            assert known.wait(20)
            if picture.shape == pixels.shape and (picture == pixels).all():
                gone.cancel()
            return encode(picture, layout)

        monkeypatch.setattr(runner, "encode", leaves)
        content = [{"type": "image", "image": pixels}, {"type": "text", "text": "what is it?"}]
        gone = model.engine.submit(model.chat_request([{"role": "user", "content": content}], **_LONG))
        handles = [model.engine.submit(model.chat_request(messages, **_LONG)) for messages in 2 * conversations]
        known.set()
        completions = [handle.result() for handle in handles]
        assert [each and each.ids for each in completions] == 2 * alone
        assert gone.finish_reason == "closed"
        assert model.engine.stats().preemptions > 0


@pytest.mark.full
def test_features_of_requests_that_wait(
    vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No picture is read for requests without a place while as many features wait as may; all are answered."""
    oracle = vision_oracles["qwen3vl"]
    with _load(oracle, "hf", "numpy") as model:
        conversations = [_messages(oracle, case) for case in oracle.cases]  # one of them has two pictures
        model.engine.configure(replace(model.engine.options, parallel=1))
        monkeypatch.setattr(driver, "WAITING_FEATURE_BYTES", 1)
        assert model.vision is not None
        encode, waiting, begun = model.vision.runner.encode, list[int](), list[int]()
        handles = list[Any]()

        def noted(pixels: Any, layout: Any) -> Any:
            waiting.append(sum(state.images is not None for state in model.engine._scheduler.waiting))
            begun.append(sum(bool(handle.image_features) for handle in handles))
            return encode(pixels, layout)

        monkeypatch.setattr(model.vision.runner, "encode", noted)
        requests = [model.chat_request(messages, **_GREEDY) for messages in conversations]
        handles += model.engine.submit_all(requests)
        completions = [handle.result() for handle in handles]
        assert [each and each.ids for each in completions] == [case["greedy"] for case in oracle.cases]
        assert len(waiting) > 1
        assert max(waiting) == 0
        assert max(begun) <= 1


def test_a_tower_that_fails_ends_its_request_alone(
    vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _load(vision_oracles["qwen3vl"], "hf", "numpy") as model:
        assert model.vision is not None
        text = [{"role": "user", "content": "what is in the street?"}]
        stream = model.engine.submit(model.chat_request(text, max_tokens=9, ignore_eos=True))
        next(stream)

        def fails(pixels: Any, layout: Any) -> Any:
            raise ValueError("a fault of the tower")

        monkeypatch.setattr(model.vision.runner, "encode", fails)
        picture = {"type": "image", "image": np.zeros((32, 32, 3), np.uint8)}
        with pytest.raises(ValueError, match="a fault of the tower"):
            model.chat([{"role": "user", "content": [picture]}], max_tokens=1)
        stream.result()
        assert stream.finish_reason == "length"


@pytest.mark.full
def test_streams_go_on_while_pictures_are_read(
    vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pictures, of one request and of two, sequences that run have a token."""
    with _load(vision_oracles["qwen3vl"], "hf", "numpy") as model:
        assert model.vision is not None
        text = [{"role": "user", "content": "what is in the street?"}]
        stream = model.engine.submit(model.chat_request(text, max_tokens=60, ignore_eos=True))
        next(stream)
        encode, tokens = model.vision.runner.encode, list[int]()

        def noted(pixels: Any, layout: Any) -> Any:
            tokens.append(stream.usage.completion_tokens)
            return encode(pixels, layout)

        monkeypatch.setattr(model.vision.runner, "encode", noted)
        pictures = [{"type": "image", "image": np.full((32, 32, 3), i, np.uint8)} for i in range(6)]
        contents = [[*some, {"type": "text", "text": "see"}] for some in (pictures[:4], pictures[4:])]
        requests = [model.chat_request([{"role": "user", "content": each}], max_tokens=1) for each in contents]
        for handle in model.engine.submit_all(requests):
            handle.result()
        assert len(tokens) == len(pictures)
        assert all(before < after for before, after in pairwise(tokens))
        stream.cancel()


def test_logits(vision_oracles: dict[str, VisionOracle]) -> None:
    """The last row of every prompt, whatever the chunks that it is read in."""
    for name in NAMES:
        oracle = vision_oracles[name]
        with _load(oracle, "hf", "numpy") as model:
            for chunk in (512, 7):
                options = replace(model.engine.options, chunk_tokens=chunk)
                model.engine.configure(options)
                for number, case in enumerate(oracle.cases[:3]):
                    request = model.chat_request(_messages(oracle, case), max_tokens=1, cache_prompt=False)
                    handle = model.engine.submit(replace(request, output="logits", first_row=len(case["ids"]) - 1))
                    handle.result()
                    assert handle.logits is not None
                    np.testing.assert_allclose(handle.logits[-1], oracle.logits[number], atol=2e-4)


@pytest.mark.full
def test_fixed_chunks_and_an_image_that_must_be_in_one(
    vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that is read from the cache has the chunks of the first time, so that no bit depends on it."""
    with _load(vision_oracles["gemma3-vision"], "hf", "numpy", deterministic=True) as model:
        assert model.vision is not None
        chunk, words = model.runner.fixed_chunk, "see"
        picture = {"type": "image", "image": np.full((32, 32, 3), 9, np.uint8)}
        messages = [{"role": "user", "content": [{"type": "text", "text": words}, picture]}]
        while (first := model.chat_ids(messages).index(model.vision.token)) < chunk - 2:
            words += " what" * ((chunk - 12 - first) // 10) or "."
            messages[0]["content"] = [{"type": "text", "text": words}, picture]
        assert first < chunk < first + 4
        steps, step = list[tuple[int, int]](), model.runner.step

        def noted(parts: Any) -> Any:
            steps.extend((part.sequence.length, part.rows) for part in parts)
            return step(parts)

        monkeypatch.setattr(model.runner, "step", noted)
        runs = []
        for _ in range(2):
            steps.clear()
            model.chat(messages, max_tokens=1)
            runs.append(steps[:])
        assert runs[0][0] == (0, first)
        assert set(runs[1]) <= set(runs[0])


def test_another_picture_is_not_in_the_cache(seeing: tuple[VisionOracle, LanguageModel]) -> None:
    """The same prompt with another picture of the same size begins alike up to the picture, and not further."""
    _, model = seeing
    pixels = np.zeros((32, 32, 3), np.uint8)
    answers, cached = [], []
    for value in (0, 200, 0):
        pixels[:] = value
        content = [{"type": "image", "image": pixels}, {"type": "text", "text": "what is it?"}]
        handle = model.engine.submit(model.chat_request([{"role": "user", "content": content}], **_GREEDY))
        completion = handle.result()
        assert completion is not None
        answers.append(completion.ids)
        cached.append(handle.usage.cached_tokens)
    assert answers[0] == answers[2]
    token = model.vision.token if model.vision is not None else 0
    ids = model.chat_ids([{"role": "user", "content": content}])
    assert cached[1] <= ids.index(token)
    assert cached[2] == len(ids) - 1


def test_what_is_refused(seeing: tuple[VisionOracle, LanguageModel]) -> None:
    """Tokens of images without images, parts that are no images, damaged pictures, last messages with images."""
    oracle, model = seeing
    case = oracle.cases[0]
    for call in (model.generate, model.score, model.embed, model.logits):
        with pytest.raises(InputError, match="stand for images"):
            call(case["ids"])
    for part, words in (
        ({"type": "image"}, "must be"),
        ({"type": "image", "image": b"GIF89a"}, "damaged"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "data URL"),
        ({"type": "image_url", "image_url": "/etc/hostname"}, "data URL"),
        ({"type": "audio"}, "models take text alone"),
    ):
        with pytest.raises(InputError, match=words):
            model.chat([{"role": "user", "content": [part]}], max_tokens=1)
    assert model.vision is not None
    text = f"see {model.vision.processor.placeholder} there"
    content = [*_messages(oracle, case)[0]["content"], {"type": "text", "text": text}]
    with pytest.raises(InputError, match="2 places for images"):
        model.chat([{"role": "user", "content": content}], max_tokens=1, parse_special=True)
    model.chat([{"role": "user", "content": content}], max_tokens=1)  # plain text


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_drafts(name: str, vision_oracles: dict[str, VisionOracle]) -> None:
    """Prompts with pictures have the same answers, whatever is drafted; what drafts reads tokens alone."""
    oracle = vision_oracles[name]
    conversations, wanted = (
        [_messages(oracle, case) for case in oracle.cases],
        [case["greedy"] for case in oracle.cases],
    )
    with _load(oracle, "hf", "numpy") as model:
        model.engine.use_drafts(Drafts(NgramDrafter(), 6, measured=False))
        assert [each.ids for each in model.chat(conversations, **_GREEDY)] == wanted
        if name != "gemma3-vision":  # whose answers repeat nothing within twelve tokens
            assert model.engine.stats().accepted_tokens > 0
    options: dict[str, Any] = {"precision": "exact", "image_tokens": IMAGE_TOKENS.get(name)}
    folder = oracle.folder / "hf"
    with load(folder, device="cpu", draft_model=folder, **options) as model:
        assert model.draft_model is not None
        assert model.draft_model.vision is None
        assert [each.ids for each in model.chat(conversations[:2], **_GREEDY)] == wanted[:2]
        assert model.engine.stats().drafted_tokens > 0


def test_without_the_part_that_reads_images(vision_oracles: dict[str, VisionOracle], tmp_path: Path) -> None:
    """Text is read as before; images and their tokens are refused by name."""
    oracle = vision_oracles["qwen3vl"]
    with _load(oracle, "hf", "numpy", vision=False) as model:
        assert model.vision is None
        with pytest.raises(InputError, match="does not read images"):
            model.chat(_messages(oracle, oracle.cases[0]), max_tokens=1)
        with pytest.raises(InputError, match="stand for images"):
            model.generate(oracle.cases[0]["ids"], max_tokens=1)
    alone = tmp_path / "model.gguf"
    alone.write_bytes((oracle.folder / "model.gguf").read_bytes())
    with load_with(alone, device="numpy") as model:
        assert model.vision is None
    with pytest.raises(InputError, match="path of a file"):
        load_with(alone, device="numpy", mmproj=tmp_path / "none.gguf")
    with load_with(alone, device="numpy", mmproj=oracle.folder / "mmproj.gguf", image_tokens=(4, 16)) as model:
        case = oracle.cases[0]
        assert model.chat(_messages(oracle, case), **_GREEDY).ids == case["greedy"]


@pytest.mark.parametrize("name", NAMES)
def test_packed_weights(name: str, vision_oracles: dict[str, VisionOracle]) -> None:
    """The kernels of the CPU."""
    pytest.importorskip("llvmlite", reason="llvmlite is in the extra `cpu`")
    oracle = vision_oracles[name]
    with _load(oracle, "hf", "cpu") as model:
        for case in oracle.cases[3:5]:
            assert model.chat(_messages(oracle, case), **_GREEDY).ids == case["greedy"]


@pytest.mark.parametrize(("name", "source"), SOURCES)
def test_on_a_device(
    name: str, source: str, vision_oracles: dict[str, VisionOracle], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy ids, alone and together with text; features are those of NumPy, on the device and on the host."""
    oracle = vision_oracles[name]
    with _load(oracle, source, device, cache="f32") as model:
        conversations = [_messages(oracle, case) for case in oracle.cases]
        wanted = [case["greedy"] for case in oracle.cases]
        assert [each.ids for each in model.chat(conversations, cache_prompt=False, **_GREEDY)] == wanted
        text = [{"role": "user", "content": "what is in the street?"}]
        plain = model.chat(text, **_GREEDY).ids
        together = model.chat([text, *conversations[:2]], cache_prompt=False, **_GREEDY)
        assert [each.ids for each in together] == [plain, *wanted[:2]]
        assert model.vision is not None
        for number, case in enumerate(oracle.cases[:4]):
            (picture,) = (open_picture(path) for path in oracle.pictures(case))
            layout = model.vision.processor.layout(picture.width, picture.height)
            monkeypatch.setattr(gpu_tower, "DEVICE_BYTES", 0 if number == 1 else 1 << 30)
            features = model.vision.runner.encode(picture.pixels, layout)
            assert isinstance(features, np.ndarray if number == 1 else DeviceFeatures)
            assert len(features) == layout.tokens
            made = np.asarray(features)
            wide = oracle.arrays[f"features-{number}"]
            assert np.abs(made[:, : wide.shape[1]] - wide).max() < 2e-3


def test_pictures_of_many_sizes_on_a_device(
    vision_oracles: dict[str, VisionOracle], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is for them is bounded, and one that the device cannot hold is refused in words.

    Parts of a plan that are submitted one after the other make the same features.
    """
    oracle = vision_oracles["qwen3vl"]
    file, tower = _open(oracle, "hf")
    runner = gpu_tower.GpuTower(tower, TowerSource(file, tower), device, precision="exact")
    file.close()
    found, counts = list[Any](), list[int]()
    for side in (*range(34, 47), 34):
        pixels = np.full((side, 48, 3), side, np.uint8)
        found.append(np.asarray(runner.encode(pixels, tower.processor.layout(48, side))))
        counts.append(len(runner._buffers))
    assert np.array_equal(found[0], found[-1])
    assert counts[-1] <= max(counts[: gpu_tower._KEPT_PLANS])
    monkeypatch.setattr(gpu_tower, "_DISPATCHES", 7)
    runner._bound.clear()
    layout = tower.processor.layout(48, 34)
    assert np.array_equal(np.asarray(runner.encode(np.full((34, 48, 3), 34, np.uint8), layout)), found[0])
    parts = runner._bound[layout.patches]
    assert {len(part.dispatches) for part in parts[:-1]} == {7}
    assert sum(len(part.dispatches) for part in parts) == len(runner._plan(layout.patches).launches)
    runner._lowering = Lowering(replace(device.caps, max_binding=1 << 16), "exact")
    with pytest.raises(InputError, match=r"a picture of 300 × 200 is too large for this device; make it smaller"):
        runner.encode(np.zeros((200, 300, 3), np.uint8), tower.processor.layout(300, 200))
    runner.close()


def test_warm_up_compiles_what_pictures_want(
    vision_oracles: dict[str, VisionOracle], device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's first picture of a usual size compiles nothing: streams would wait for it."""
    file, tower = _open(vision_oracles["qwen3vl"], "hf")
    runner = gpu_tower.GpuTower(tower, TowerSource(file, tower), device, precision="exact")
    file.close()
    compiled, compile_steps = set[Any](), device.compile

    def noted(steps: Any) -> None:
        steps = list(steps)
        compiled.update(map(key_of, steps))
        compile_steps(steps)

    monkeypatch.setattr(device, "compile", noted)
    runner.warm_up()
    warm = set(compiled)
    runner.encode(np.zeros((700, 900, 3), np.uint8), tower.processor.layout(900, 700))
    runner.wait()
    assert warm
    assert compiled == warm
    runner.close()


def test_a_server_warms_its_tower_up(vision_oracles: dict[str, VisionOracle], monkeypatch: pytest.MonkeyPatch) -> None:
    with _load(vision_oracles["smolvlm"], "hf", "numpy") as model:
        asked = list[bool]()
        assert model.vision is not None
        monkeypatch.setattr(model.vision.runner, "warm_up", lambda: asked.append(True))
        model.engine.warm_up()
        assert asked


def test_command_line(vision_oracles: dict[str, VisionOracle], tmp_path: Path) -> None:
    """`generate --image`, and `/image` or a path in `chat`; a conversation with pictures is saved and read again."""
    oracle = vision_oracles["qwen3vl"]
    case, model = oracle.cases[0], ("-m", oracle.folder / "hf", "--device", "numpy", "--precision", "exact")
    (picture,) = oracle.pictures(case)
    text = case["messages"][0]["content"][1]["text"]
    done = shaderlm("generate", *model, "--image", picture, "-n", 12, "--ignore-eos", "--json", text)
    assert json.loads(done.out)["ids"] == case["greedy"]
    kept = tmp_path / "kept.json"
    lines = [f"/image {picture}", str(picture), text, "/image none.png", f"/save {kept}", f"/load {kept}", "more"]
    done = shaderlm("chat", *model, "-n", 4, "-t", 0, given="\n".join(lines))
    assert "1 picture for your next message" in done.err
    assert "2 pictures for your next message" in done.err
    assert "cannot be read" in done.err
    assert done.code == 0
    assert [part["type"] for part in json.loads(kept.read_text())[0]["content"]] == ["image_url", "image_url", "text"]
    for more, words in (
        (("--raw", "--image", picture), "--image needs a chat template"),
        (("--image", tmp_path / "none.png"), "cannot be read"),
        (("--image", picture, "--no-vision"), "does not read images"),
    ):
        assert words in shaderlm("generate", *model, *more, "x").err


def test_info(vision_oracles: dict[str, VisionOracle]) -> None:
    """What the part that reads images takes is told, as it is loaded."""
    for name in NAMES:
        oracle = vision_oracles[name]
        for source in ("hf", "model.gguf"):
            facts = json.loads(shaderlm("info", oracle.folder / source, "--json").out)["images"]
            file, tower = _open(oracle, source)
            formats = {each: "f32" if tensor.kind == "f32" else "f16" for each, tensor in file.tensors.items()}
            assert facts["gpu_weight_bytes"] == replace(tower, formats=formats).weight_bytes
            assert facts["layers"] == tower.layers
            file.close()
        assert "of weights on a GPU" in (out := shaderlm("info", oracle.folder / "hf").out)
        assert "1,024 × 1,024, whose scratch is not counted" in out
