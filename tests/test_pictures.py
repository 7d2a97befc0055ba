"""Pictures: whatever bytes there are, pixels or an error in words; and the layouts of processors."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shaderlm.compile.lowering import Lowering
from shaderlm.errors import InputError
from shaderlm.gpu import Device, Program
from shaderlm.graph import interpret
from shaderlm.models.vision import patches_graph, patches_inputs
from shaderlm.vision import MAX_PIXELS, Picture, Processor, open_picture

from .tiers import runs_by_default
from .vision_oracles import VisionOracle

Image = pytest.importorskip("PIL.Image", reason="Pillow is in the extra `vision`")


def _file(image: Any, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def _scene(width: int = 12, height: int = 8) -> Any:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x * 20 % 256, y * 30 % 256, (x + y) * 10 % 256], -1).astype(np.uint8))


def _chunk(kind: bytes, data: bytes) -> bytes:
    """Of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int) -> bytes:
    """A header that promises so many pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", zlib.compress(b"\0" * 100)) + _chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_formats(kind: str) -> None:
    """Without loss, the pixels are the same; otherwise they are close."""
    scene = _scene()
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    picture = open_picture(_file(scene, kind, **options))
    assert (picture.width, picture.height) == (12, 8)
    error = np.abs(picture.pixels.astype(int) - np.asarray(scene).astype(int))
    assert error.max() == 0 if kind != "JPEG" else error.mean() < 20


def test_sources(tmp_path: Path) -> None:
    """A path, bytes, a data URL, an image and an array are the same picture."""
    data = _file(_scene(), "PNG")
    path = tmp_path / "a picture.png"
    path.write_bytes(data)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    by_bytes = [open_picture(source) for source in (path, str(path), data, bytearray(data), url)]
    by_pixels = [open_picture(source) for source in (_scene(), np.asarray(_scene()))]
    assert len({picture.key for picture in by_bytes}) == len({picture.key for picture in by_pixels}) == 1
    assert all(np.array_equal(picture.pixels, np.asarray(_scene())) for picture in (*by_bytes, *by_pixels))
    assert open_picture(by_bytes[0]) is by_bytes[0]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(orientation: int) -> None:
    """EXIF says how a picture is held."""
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = _file(_scene(), "PNG", exif=exif)
    picture, wanted = open_picture(data), ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert (picture.width, picture.height) == wanted.size
    assert np.array_equal(picture.pixels, np.asarray(wanted))
    assert np.array_equal(open_picture(Image.open(io.BytesIO(data))).pixels, np.asarray(wanted)), "an image of Pillow"
    assert open_picture(wanted).key == open_picture(np.asarray(wanted)).key, "one that is turned already"


def test_transparency_is_white() -> None:
    """In RGBA, grey with alpha, and a palette with a transparent entry."""
    alpha = np.zeros((2, 2, 4), np.uint8)
    alpha[:, 1] = (10, 20, 30, 255)
    alpha[0, 0] = (200, 0, 0, 51)
    pixels = open_picture(_file(Image.fromarray(alpha), "PNG")).pixels
    assert pixels[1, 0].tolist() == [255] * 3
    assert pixels[0, 1].tolist() == [10, 20, 30]
    assert pixels[0, 0].tolist() == [244, 204, 204]
    grey = Image.new("LA", (1, 1), (0, 0))
    assert open_picture(_file(grey, "PNG")).pixels.tolist() == [[[255] * 3]]
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([9, 9, 9, 1, 2, 3])
    palette.putpixel((1, 0), 1)
    assert open_picture(_file(palette, "PNG", transparency=0)).pixels.tolist() == [[[255] * 3, [1, 2, 3]]]


def test_depths_and_colours() -> None:
    """16 bits of grey, one bit, CMYK, and the first frame of several."""
    deep = Image.fromarray(np.array([[0, 256, 65535]], np.uint16))
    assert open_picture(_file(deep, "PNG")).pixels[0, :, 0].tolist() == [0, 1, 255]
    dark = Image.fromarray(np.array([[0, 3, 255]], np.uint16))
    assert open_picture(_file(dark, "PNG")).pixels.max() == 0, "all of its values fit 8 bits, and it is black"
    assert open_picture(_file(Image.new("1", (3, 1), 1), "PNG")).pixels.tolist() == [[[255] * 3] * 3]
    inks = open_picture(_file(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG")).pixels[0, 0].astype(int)
    assert inks[0] < 40
    assert inks[1:].min() > 200
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    film = _file(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert open_picture(film).pixels[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("mode", ["I;16", "L", "RGB", "RGBA"])
def test_memory_of_pixels(mode: str) -> None:
    """A picture of the most megapixels is decoded in 0.6 GB: 12 bytes for each of its pixels, where NumPy has them."""
    values = np.arange(1 << 20).reshape(1024, 1024).astype(np.uint16)
    data = _file(Image.fromarray(values) if mode == "I;16" else Image.new(mode, (1024, 1024)), "PNG")
    picture = open_picture(data)
    tracemalloc.start()
    try:
        assert picture.pixels.shape == (1024, 1024, 3)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"", "0 bytes"),
        (b"hello", "PNG, JPEG, WebP, GIF or BMP"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "PNG, JPEG"),
        (_file(_scene(), "TIFF"), "PNG, JPEG"),
        (_png(1 << 20, 1 << 20), "megapixels"),
        (_png(10_000, 10_000), "megapixels"),
        ("no/such.png", "cannot be read: No such file"),
        (".", "is a directory"),
        ("https://example.org/a.png", "addresses are not fetched"),
        ("data:image/png,abc", "base64"),
        ("data:image/png;base64,@@@", "not valid base64"),
        (7, "got int"),
        (np.zeros((2, 2), np.uint8), "height, width, 3"),
        (np.zeros((0, 2, 3), np.uint8), "height, width, 3"),
    ],
    ids=lambda value: repr(value)[:20] if isinstance(value, (bytes, str)) else None,
)
def test_what_is_no_picture(source: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        _ = open_picture(source).pixels


def test_limits_come_before_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a file that is too large, nothing is read; of one that promises too many pixels, none are decoded."""
    monkeypatch.setattr("shaderlm.vision.pictures.MAX_BYTES", 1 << 20)
    large = tmp_path / "large.png"
    with large.open("wb") as file:
        file.truncate(2 << 20)
    for source in (large, b"\0" * (2 << 20), "data:image/png;base64," + "A" * (2 << 20)):
        with pytest.raises(InputError, match="1 MiB, this one has"):
            open_picture(source)
    started = time.process_time()
    with pytest.raises(InputError, match="50 megapixels"):
        open_picture(_png(MAX_PIXELS, 2))
    assert time.process_time() - started < 1


def test_truncated_files() -> None:
    """Each beginning of a file is refused, when it is opened or when it is decoded."""
    for kind in ("PNG", "JPEG", "WEBP", "BMP"):
        data = _file(_scene(40, 40), kind)
        for length in range(0, len(data) - 16, max(1, len(data) // 12)):
            with pytest.raises(InputError):
                _ = open_picture(data[:length]).pixels


def _files_of_all_kinds() -> list[bytes]:
    """Of all formats and modes, with several frames, and with blocks that are no pixels."""
    scene, deep = _scene(33, 21), np.arange(33 * 21).reshape(21, 33) * 90
    several = {"save_all": True, "append_images": [scene.transpose(0), scene.transpose(1)]}
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * 3000
    return [
        *(_file(scene, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP")),
        *(_file(scene, kind, **several) for kind in ("PNG", "WEBP", "GIF")),
        *(_file(scene.convert(mode), "PNG") for mode in ("1", "L", "LA", "RGBA", "P")),
        _file(Image.fromarray(deep.astype(np.uint16)), "PNG"),
        _file(scene.quantize(8), "PNG", transparency=0),
        _file(scene.convert("CMYK"), "JPEG"),
        _file(scene, "JPEG", progressive=True, exif=exif, icc_profile=b"\0" * 70_000),
        _file(scene, "PNG", exif=exif, icc_profile=bytes(5000)),
        _file(scene.convert("RGBA"), "WEBP", lossless=True, exif=exif),
        _file(scene.convert("P"), "BMP"),
    ]


def _resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def test_damaged_files() -> None:
    """Whatever bytes differ: pixels of the size that was announced, or our own error, in bounded time and memory."""
    rng = random.Random(1)
    files, count = _files_of_all_kinds(), 300 if runs_by_default() else 5000
    slowest, before = 0.0, 0
    for i in range(count):
        if i == count // 2:
            before = _resident()
        data = bytearray(files[i % len(files)])
        for _ in range(rng.choice((1, 2, 5, 40))):
            # Headers more often than contents.
            at = rng.randrange(min(len(data), rng.choice((40, len(data)))))
            data[at] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        started = time.process_time()
        try:
            picture = open_picture(bytes(data))
            assert picture.pixels.shape == (picture.height, picture.width, 3)
        except InputError:
            pass
        slowest = max(slowest, time.process_time() - started)
    assert slowest < 1
    assert _resident() - before < 64 << 20


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF"])
def test_the_first_of_many_frames(kind: str) -> None:
    """It is all that is decoded."""
    frames = [_scene(8, 8), *(Image.new("RGB", (8, 8), (i % 256, 0, 0)) for i in range(200))]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    film = _file(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert np.array_equal(open_picture(film).pixels, np.asarray(_scene(8, 8)))


def _with_chunks(*chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG with these after its header."""
    data = _file(_scene(), "PNG")
    return data[:33] + b"".join(_chunk(*each) for each in chunks) + data[33:]


_ZEROS = zlib.compress(bytes(100 << 20))


@pytest.mark.parametrize(
    "chunk",
    [
        (b"zTXt", b"x\0\0" + _ZEROS),
        (b"iTXt", b"x\0\1\0\0\0" + _ZEROS),
        (b"iCCP", b"x\0\0" + _ZEROS),
        (b"tEXt", b"x\0" + b"y" * (8 << 20)),
        (b"eXIf", b"MM\0*" + b"\xff" * (8 << 20)),
        (b"PLTE", bytes(3 * 256)),
    ],
    ids=lambda chunk: chunk[0].decode(),
)
def test_chunks_that_are_no_pixels(chunk: tuple[bytes, bytes]) -> None:
    """Those that become 100 MiB, or have 8: pixels or an error in words, soon, and no such memory."""
    data = _with_chunks(chunk)
    started, before = time.process_time(), _resident()
    with suppress(InputError):
        assert open_picture(data).pixels.shape == (8, 12, 3)
    assert time.process_time() - started < 1
    assert _resident() - before < 64 << 20


_EXIF = b"\xff\xe1" + struct.pack(">H", 65_535) + b"Exif\0\0" + b"\xff" * 65_527  # a block of a JPEG


def _jpeg_with(blocks: bytes, **options: Any) -> bytes:
    data = _file(_scene(64, 64), "JPEG", **options)
    return data[:2] + blocks + data[2:]


def _jpeg_of_scans() -> bytes:
    data = _file(Image.new("RGB", (2000, 1000)), "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:-2] + 600 * data[last:-2] + data[-2:]


def _gif_of_comments() -> bytes:
    data = _file(_scene(), "GIF")
    colours = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:colours] + 50_000 * b"\x21\xfe\1x\0" + data[colours:]


def _png_of_blocks(side: int, size: int) -> bytes:
    """Black, in blocks of so many bytes."""
    contents = zlib.compress(bytes(side * (3 * side + 1)), 0)
    blocks = b"".join(_chunk(b"IDAT", contents[i : i + size]) for i in range(0, len(contents), size))
    return _png(side, side)[:33] + blocks + _chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: _jpeg_with(400 * _EXIF), "64 blocks of EXIF"),
        (lambda: _jpeg_with(100_000 * b"\xff\xfe\0\2"), "too many parts"),
        (_jpeg_of_scans, "may have 500 scans"),
        (_gif_of_comments, "too many parts"),
        (lambda: _with_chunks(*[(b"tEXt", b"x\0y")] * 20_000), "too many parts"),
        (lambda: _png_of_blocks(100, 1), "too many parts"),
    ],
)
def test_files_of_many_parts(made: Callable[[], bytes], words: str) -> None:
    """Those that decoders take time for, however few bytes and pixels there are: refused in words, soon."""
    data = made()
    started = time.process_time()
    with pytest.raises(InputError, match=words):
        _ = open_picture(data).pixels
    assert time.process_time() - started < 1


def test_usual_numbers_of_parts() -> None:
    """A JPEG with much EXIF and ten scans, and a PNG in blocks of 1 KiB."""
    assert open_picture(_jpeg_with(8 * _EXIF, progressive=True)).pixels.shape == (64, 64, 3)
    assert open_picture(_png_of_blocks(1000, 1024)).pixels.shape == (1000, 1000, 3)


# Layouts -------------------------------------------------------------------------------------------------


def _processor(**changes: Any) -> Processor:
    half = (0.5, 0.5, 0.5)
    sizes = {"sizing": "area", "patch": 8, "merge": 2, "filter": "bicubic", "mean": half, "std": half}
    return Processor(**{**sizes, "least_pixels": 1024, "most_pixels": 4096, **changes})


@pytest.mark.parametrize("size", [(40, 56), (32, 32), (48, 30), (120, 8), (64, 64), (1, 1), (3000, 15)])
def test_areas(size: tuple[int, int]) -> None:
    """Whole tokens, between the least and the most pixels where the shape allows it."""
    layout = _processor().layout(*size)
    (rows, columns), unit = layout.sizes[0], 16
    assert rows % unit == columns % unit == 0
    assert layout.tokens == rows * columns // unit**2 == layout.grid[0] * layout.grid[1]
    assert max(size) > 20 * min(size) or 1024 <= rows * columns <= 4096
    places = layout.places()
    assert len({tuple(place) for place in places.tolist()}) == layout.patches
    assert places[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]  # the patches of a token


def test_extreme_shapes_are_refused_where_grids_follow_them() -> None:
    with pytest.raises(InputError, match="200 times"):
        _processor().layout(1, 201)


@pytest.mark.parametrize("size", [(1, 1), (1, 4000), (4000, 1), (64, 64), (65, 31), (6000, 100)])
def test_tiles(size: tuple[int, int]) -> None:
    """Tiles cover the picture, and the last one shows all of it."""
    layout = _processor(sizing="tiles", side=32, longest=64).layout(*size)
    rows, columns = layout.tile_grid
    assert len(layout.tiles) == rows * columns + 1
    assert layout.tokens == 4 * len(layout.tiles)
    assert layout.sizes[1] == (32 * max(1, rows), 32 * max(1, columns))


# Whole tiles, which nothing has to be resized for; and bytes that end within a word.
@pytest.mark.parametrize("size", [(64, 64), (51, 33), (64, 7)])
def test_bytes_of_pixels_become_patches(size: tuple[int, int], device: Device) -> None:
    """The first op that reads them makes numbers of them, also where stages are put together."""
    processor = _processor(sizing="tiles", side=32, longest=64, mean=(0.4, 0.5, 0.6))
    layout = processor.layout(*size)
    graph = patches_graph(layout, processor)
    readers = [node for node in graph.nodes if "pixels" in node.inputs.values()]
    assert {node.op for node in readers} == {"resize"}
    assert [node for node in graph.nodes if node.dims.get("bytes")] == readers
    pixels = np.random.default_rng(1).integers(0, 256, (*layout.source, 3), np.uint8)
    if layout.sizes[0] == layout.source:
        tile = (pixels[:8, :8].transpose(2, 0, 1).reshape(-1) / 255 - np.repeat([0.4, 0.5, 0.6], 64)) / 0.5
        whole = interpret.run(graph, {"pixels": pixels, **patches_inputs(layout, processor)})["patches"]
        np.testing.assert_allclose(whole[0], tile, atol=1e-6)
    inputs: dict[str, Any] = {"pixels": np.pad(pixels.reshape(-1), (0, -pixels.size % 4))}
    inputs |= patches_inputs(layout, processor)
    plan = Lowering(device.caps).plan("pixels", graph)
    contents = {
        name: np.array(spec.words, np.uint32) if spec.role == "params" else inputs.get(name, spec.nbytes)
        for name, spec in plan.buffers.items()
    }
    assert contents["pixels"].nbytes == plan.buffers["pixels"].nbytes
    made = device.run(Program(contents, plan.program.steps, plan.outputs))["patches"].view(np.float32)
    wanted = interpret.run(graph, {**inputs, "pixels": pixels})["patches"]
    np.testing.assert_allclose(made.reshape(wanted.shape), wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["gemma3-vision", "qwen3vl", "smolvlm"])
def test_oracles(name: str, vision_oracles: dict[str, VisionOracle]) -> None:
    """As many patches as the processor of the family makes."""
    oracle = vision_oracles[name]
    config = json.loads((oracle.folder / "hf" / "preprocessor_config.json").read_text(encoding="utf-8"))
    changes: dict[str, Any] = {
        "gemma3-vision": {"sizing": "square", "side": config["size"].get("height", 0)},
        "qwen3vl": {"sizing": "area"},
        "smolvlm": {"sizing": "tiles", "side": 32, "longest": config["size"].get("longest_edge", 0)},
    }[name]
    processor = _processor(**changes)
    for case in oracle.cases:
        pictures = [open_picture(path) for path in oracle.pictures(case)]
        assert all(isinstance(picture, Picture) for picture in pictures)
        tokens = sum(processor.layout(picture.width, picture.height).tokens for picture in pictures)
        assert tokens == case["features"]["shape"][0]
