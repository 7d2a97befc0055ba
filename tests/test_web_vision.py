"""Exports that see: what is written, what is refused, and the numbers of vision.js, which are those of Python."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.engine.tower_files import find_tower
from shaderlm.errors import InputError, ModelError
from shaderlm.formats.opening import open_checkpoint
from shaderlm.graph.vision import FILTERS, resize_weights
from shaderlm.models.vision import FAMILIES, Tower, patches_inputs, tower_inputs
from shaderlm.vision.processors import Processor
from shaderlm.web import plans
from shaderlm.web.document import programs
from shaderlm.web.export import export, static_files
from shaderlm.web.model import opened
from shaderlm.web.variants import SOFTWARE
from shaderlm.web.vision import EXPORTED, _most_patches, exportable, patch_counts

from . import node
from .vision_checkpoints import recorded, write_folder
from .vision_oracles import IMAGE_TOKENS, VisionOracle

NAMES = ("gemma3-vision", "mistral3", "qwen3vl", "smolvlm")
SOURCES = {"qwen3vl": "model.gguf"}  # of the others a folder


@contextmanager
def few_plans() -> Iterator[None]:
    """For software, and for few numbers of rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "VARIANTS", (SOFTWARE,))
        patch.setattr(plans, "ROWS", (1,))
        patch.setattr(plans, "IMAGE_ROWS", (64,))
        patch.setattr(plans, "KINDS", ("greedy",))
        yield


def export_oracle(oracle: VisionOracle, folder: Path) -> dict[str, Any]:
    """Its plan.json."""
    name = oracle.folder.name
    source = oracle.folder / SOURCES.get(name, "hf")
    with opened(str(source), image_tokens=IMAGE_TOKENS.get(name)) as model:
        return export(model, folder)


def tower_of(oracle: VisionOracle) -> Tower:
    with open_checkpoint(oracle.folder / "hf") as file, opened(str(oracle.folder / "hf"), vision=False) as model:
        found = find_tower(file, model.config, None, None, on_device=True)
        assert found is not None
        found.file.close()
        return found.tower


def documented_keys() -> set[str]:
    """Of "vision", in docs/web.md."""
    text = (Path(__file__).parent.parent / "docs" / "web.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (`[^|]+) \|", text.partition("### Keys of the pictures\n")[2].partition("\n`pixels` has")[0], re.M
    )
    return set(re.findall(r"`(\w+)`", " ".join(rows)))


# The folder --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "levels", "counts", "matrix"),
    [
        ("smolvlm", 1, [16], "mm.model.fc.weight"),
        pytest.param("qwen3vl", 3, [16, 24, 32, 48, 64], "mm.2.weight", marks=pytest.mark.full),
    ],
)
def test_an_export_that_sees(
    name: str, levels: int, counts: list[int], matrix: str, vision_oracles: dict[str, VisionOracle], tmp_path: Path
) -> None:
    with few_plans():
        plan = export_oracle(vision_oracles[name], tmp_path / "web")
    eyes, (variant,) = plan["vision"], plan["variants"]
    has_axes = name == "qwen3vl"
    assert (eyes["levels"], eyes["several_axes"], eyes["sees_itself"]) == (levels, has_axes, False)
    assert eyes["token"] in eyes["placeholders"]
    assert documented_keys() == set(eyes)
    assert [tower["patches"] for tower in variant["towers"]] == counts
    names = [name for name, _, _ in variant["buffers"]]
    assert {"image_rows", "features"} <= set(names)
    assert all(any(name.startswith(each) for name in plan["weights"]) for each in ("v.patch_embd.weight", matrix))
    used = {name for name, _ in (*plan["probes"], *variant["pixels"].values())}
    for program in programs(variant):
        own = program.get("buffers", [])
        for (
            shader,
            *_,
        ) in program["dispatches"]:
            used.add(shader)
        numbers = {number for row in program["dispatches"] for number in row[4:]}
        assert max(numbers) < len(names) + len(own)
        assert {number for number in numbers if number >= len(names)} == set(range(len(names), len(names) + len(own)))
        assert all(role != "weight" for _, role, _ in own)
    assert used == set(plan["shaders"])
    marked = [(body["rows"], body.get("images", False)) for body in variant["bodies"]]
    assert set(marked) == {(1, False), (64, True)} | ({(1, True)} if has_axes else set())


def test_what_cannot_be_exported_is_refused(vision_oracles: dict[str, VisionOracle], tmp_path: Path) -> None:
    oracle = vision_oracles["gemma3-vision"]
    tower = tower_of(oracle)
    with opened(str(oracle.folder / "hf")) as model:
        config = model.config
    with pytest.raises(ModelError, match=r"pictures for the tower resampler cannot be exported.*--no-vision"):
        exportable(tower, "resampler", config)
    wide = replace(tower, ffn=1 << 22)
    with pytest.raises(ModelError, match=r"a binding of a browser takes .* patches, and pictures have more"):
        exportable(wide, "gemma3", config)
    with pytest.raises(ModelError, match=r"a step has .* rows in a browser, and a picture"):
        exportable(tower, "gemma3", replace(config, ffn=1 << 24))
    with (
        pytest.raises(InputError, match="mmproj must be the path of a file"),
        opened(str(oracle.folder / "hf"), mmproj="no"),
    ):
        pass
    assert set(EXPORTED) <= set(FAMILIES)


def test_sizes_of_pictures_are_bounded(vision_oracles: dict[str, VisionOracle]) -> None:
    oracle = vision_oracles["qwen3vl"]
    tower = tower_of(oracle)
    large = replace(tower, processor=replace(tower.processor, most_pixels=1 << 29))
    with opened(str(oracle.folder / "hf"), vision=False) as model:
        found = exportable(large, "qwen3vl_merger", model.config)
    counts = patch_counts(found)
    assert counts[-1] == _most_patches(tower) == found.processor.most_pixels // tower.patch**2
    assert all(4 * (a // 4) == a and b <= 1.5 * a for a, b in pairwise(counts))


def test_a_page_without_pictures_loads_little() -> None:
    """Compressed: the runtime with what it imports, and what it imports when a picture comes. docs/web.md says both."""
    files = static_files()
    text = b"".join(files[name] for name in ("shaderlm.js", "tokenizer.js", "template.js"))
    assert len(gzip.compress(text, 9)) <= 40_000
    assert len(gzip.compress(files["vision.js"], 9)) <= 11_000


# Numbers -----------------------------------------------------------------------------------------------------

SIZES = [(1, 1), (33, 31), (64, 64), (17, 300), (640, 427), (1000, 10), (3024, 4032)]
SCRIPT = """
import { layoutOf, resizeWeights, textOf, tileInputs } from "./vision.js";
import { readFileSync } from "node:fs";
const refuse = (message) => new Error(message);
const list = (arrays) => Object.fromEntries(Object.entries(arrays).map(([name, array]) => [name, Array.from(array)]));
const jobs = JSON.parse(readFileSync("jobs.json", "utf-8"));
const found = jobs.map(({ about, width, height, size, to, kind }) => {
  if (size) {
    const { first, weights } = resizeWeights(size, to, kind);
    return list({ first, weights });
  }
  const { processor } = about;
  const layout = layoutOf(processor, width, height, refuse);
  const inputs = (about.position_side ? layout.tiles : []).map((tile) => {
    const count = (tile.rows * tile.columns) / processor.patch ** 2;
    const { inputs, corners } = tileInputs(about, tile, layout.sizes[tile.stage][1], count);
    return list({ ...inputs, corners });
  });
  return { ...layout, text: textOf(processor, layout), inputs };
});
console.log(JSON.stringify(found));
"""


def in_node(folder: Path, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "vision.js").write_bytes(static_files()["vision.js"])
    (folder / "run.js").write_text(SCRIPT)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = node.run(folder, "run.js", gpu=False)
    assert done.status == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


# As in checkpoints of 2 to 4 billion parameters.
PROCESSORS = {
    "longest": Processor(
        "longest", 14, 2, "bicubic", (0.5,) * 3, (0.5,) * 3, 1540, 1540, token="x", texts={"row_end": "R", "end": "E"}
    ),
    "area": Processor("area", 16, 2, "bicubic", (0.5,) * 3, (0.5,) * 3, 768, 768, 65536, 1 << 21, token="x"),
    "tiles": Processor(
        "tiles", 16, 4, "lanczos", (0.5,) * 3, (0.5,) * 3, 512, 2048, token="x", texts={"around": "A", "whole": "W"}
    ),
}


def test_sizes_and_tiles(tmp_path: Path) -> None:
    """Those of Python, for pictures of many shapes."""
    sizes = [(a, b) for a, b in [*SIZES, *((b, a) for a, b in SIZES), (4096, 21), (2047, 1025)]]
    cases = [(processor, *size) for processor in PROCESSORS.values() for size in sizes]
    jobs = [{"about": {"processor": asdict(each)}, "width": width, "height": height} for each, width, height in cases]
    for (processor, width, height), found in zip(cases, in_node(tmp_path, jobs), strict=True):
        layout = processor.layout(width, height)
        assert found["sizes"] == [list(size) for size in layout.sizes], (width, height)
        assert found["tiles"] == [tile._asdict() for tile in layout.tiles]
        assert found["text"] == processor.text(layout)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_of_ops(name: str, vision_oracles: dict[str, VisionOracle], tmp_path: Path) -> None:
    if name not in vision_oracles:
        write_folder(tmp_path / name / "hf", name, recorded(name))
    tower = tower_of(vision_oracles.get(name, VisionOracle(tmp_path / name)))
    about = {
        "processor": asdict(tower.processor),
        "position_side": tower.side,
        "positions": tower.family.positions,
        "rotary": tower.head if tower.family.rope else 0,
        "rotary_offset": 0.5 if tower.family.rope == "between" else 0,
        "theta": tower.theta,
    }
    jobs = [{"about": about, "width": width, "height": height} for width, height in SIZES[1:4]]
    for (width, height), found in zip(SIZES[1:4], in_node(tmp_path, jobs), strict=True):
        layout = tower.processor.layout(width, height)
        wanted = tower_inputs(tower, layout)
        assert set(found["inputs"][0]) - {"corners"} == set(wanted)
        for key in wanted.keys() - {"spans"}:
            made = np.concatenate([np.array(tile[key]) for tile in found["inputs"]])
            np.testing.assert_allclose(made, wanted[key].reshape(-1), rtol=0, atol=1e-7, err_msg=key)
        for tile, count in zip(found["inputs"], layout.tile_patches, strict=True):
            assert tile["spans"] == [0, count] * count
            assert len(tile["corners"]) == 2 * count
        if len(layout.tiles) == 1:
            corners = patches_inputs(layout, tower.processor)["corners"]
            assert found["inputs"][0]["corners"] == corners.reshape(-1).tolist()


def test_weights_of_resizing(tmp_path: Path) -> None:
    """To the bit."""
    cases = [
        (size, to, kind) for kind in FILTERS for size, to in ((427, 512), (3024, 1008), (31, 32), (1, 7), (999, 3))
    ]
    jobs = [dict(zip(("size", "to", "kind"), case, strict=True)) for case in cases]
    for case, found in zip(cases, in_node(tmp_path, jobs), strict=True):
        first, weights = resize_weights(*case)
        assert found["first"] == first.tolist(), case
        assert np.array_equal(np.array(found["weights"], np.float32), weights.reshape(-1)), case
