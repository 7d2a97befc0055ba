"""Damages checkpoints and opens them, in a process of its own: python -m tests.fuzzing KIND COUNT SEED.

Half of the files keep a valid header in which lengths, offsets, types, dimensions or values differ; of the others, any
bytes differ or are missing. Each file is opened, its model configured, all tensors read, its tokenizer used, in
little memory. The last line that is printed is JSON: how many ran, what was raised other than our own errors, and
how long the slowest took.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from shaderlm.errors import ShaderlmError
from shaderlm.formats.opening import open_checkpoint
from shaderlm.models.checkpoint import architecture_of, read_config
from shaderlm.text import Tokenizer, Vocabulary, check_vocabulary

from .checkpoints import recorded, write_folder, write_gguf
from .folders import folder_of
from .tiny_models import write_tiny

SECONDS, MEMORY = 1.0, 100 << 20  # the most that a file may take; the memory beyond its size
_ADDRESSES = 4 << 30  # a process that wants more is stopped by the system
_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    31,
    255,
    256,
    0xFFFF,
    1 << 20,
    1 << 24,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    (1 << 64) - 1,
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 300, 1 << 24, 1 << 40, 1 << 64, -(1 << 70), 0.0, 1.5, -2.5, 1e-320, 1e308),
    *(
        "",
        "a",
        "Ġ",
        "▁",
        "<0x41>",
        "F16",
        "ByteLevel",
        "BPE",
        "Unigram",
        "x" * 5000,
        "\ud800",
        "(",
        "(a+)+$",
        "\\p{L}+",
    ),
    *("AAAA", "AAAAAA==", "BAAAAAAAAAA=", "BAAAAP////8="),  # tables of characters
    *([], [[]], {}, {"type": "ByteLevel"}, {"a": 1}, [1, 2], ["a", "b"], [["a", 1.0]], [None], list(range(50))),
)


class Field(NamedTuple):
    """A number in a GGUF header."""

    at: int
    form: str


def main(kind: str, count: int, seed: int) -> None:
    """Run so many mutations, and print what came of them."""
    rng = random.Random(seed)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    with tempfile.TemporaryDirectory() as name:
        mutate, path = KINDS[kind](Path(name))
        assert attempt(path) is None  # a sound one, which also imports all that is needed
        found: dict[str, Any] = {"ran": 0, "opened": 0, "wrong": [], "slowest": 0.0}
        for number in range(count):
            said = mutate(rng)
            started = time.process_time()
            try:
                with little_memory(path):
                    problem = attempt(path)
                found["opened"] += problem is None
            except ShaderlmError as refused:  # pragma: no cover
                problem = refused
            except BaseException as other:
                where = traceback.format_exc().strip().splitlines()
                found["wrong"].append(f"{number}: {said}: {type(other).__name__}: {str(other)[:200]} {where[-3:-1]}")
            seconds = time.process_time() - started  # the machine may be busy with something else
            if seconds > SECONDS:
                found["wrong"].append(f"{number}: {said}: {seconds:.1f} s")
            found["slowest"] = max(found["slowest"], seconds)
            found["ran"] += 1
    print(json.dumps({**found, "wrong": found["wrong"][:20], "problems": len(found["wrong"])}))


def attempt(path: Path) -> ShaderlmError | None:
    """Open a checkpoint and use all of it; our own error, if there is one."""
    try:
        with open_checkpoint(path) as file:
            vocabulary = Vocabulary.from_metadata(file.metadata)
            check_vocabulary(vocabulary)
            tokenizer = Tokenizer(vocabulary)
            for text in ("the inn, <|im_end|> ü 漢 12", ""):
                tokenizer.decode(tokenizer.encode(text, add_special=True))
            read_config(architecture_of(file), file)
            for name in file.tensors:
                file.dense(name)
    except ShaderlmError as problem:
        return problem
    return None


@contextmanager
def little_memory(path: Path) -> Iterator[None]:
    """Whoever asks for more than the checkpoint's size and MEMORY gets a MemoryError, used or not. On Linux."""
    if sys.platform != "linux":
        yield
        return
    size = sum(file.stat().st_size for file in path.iterdir()) if path.is_dir() else path.stat().st_size
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + size + MEMORY, _ADDRESSES))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))


# Bytes ---------------------------------------------------------------------------------------------------


def _damaged(rng: random.Random, content: bytes, end: int) -> tuple[bytes, str]:
    """Other bytes before `end`, or fewer."""
    found = bytearray(content)
    places = [rng.randrange(end) for _ in range(rng.randint(1, 4))]
    for at in places:
        found[at] = rng.choice([0, 1, 0x22, 0x5B, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    if rng.random() < 0.2:
        places.append(rng.randrange(len(content)))
        del found[places[-1] :]
    return bytes(found), f"bytes {places}"


# GGUF ----------------------------------------------------------------------------------------------------


def _fields(data: bytes) -> tuple[list[Field], int]:
    """All numbers of a header, and where it ends. A reader of its own, of the published layout."""
    found, at = [], 4

    def number(form: str) -> int:
        nonlocal at
        found.append(Field(at, form))
        (value,) = struct.unpack_from(f"<{form}", data, at)
        at += struct.calcsize(form)
        return int(value)

    def text() -> None:
        nonlocal at
        length = number("Q")
        at += length

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            inner, count = number("I"), number("Q")
            for _ in range(count):
                value(inner)
        else:
            number("BbHhIif?--Qqd"[kind])

    number("I")  # version
    tensors, pairs = number("Q"), number("Q")
    for _ in range(pairs):
        text()
        value(number("I"))
    for _ in range(tensors):
        text()
        for _ in range(number("I")):
            number("Q")
        number("I")
        number("Q")
    return found, at


def _gguf(folder: Path) -> tuple[Callable[[random.Random], str], Path]:
    return _numbers(write_tiny(folder / "tiny.gguf", "llama"))


def _scans(folder: Path) -> tuple[Callable[[random.Random], str], Path]:
    """Layers of several kinds, with lists of numbers for them."""
    return _numbers(write_gguf(folder / "tiny.gguf", recorded("nemotron_h")))


def _numbers(path: Path) -> tuple[Callable[[random.Random], str], Path]:
    sound = path.read_bytes()
    fields, end = _fields(sound)

    def mutate(rng: random.Random) -> str:
        if rng.random() < 0.5:
            content, said = _damaged(rng, sound, end)
        else:
            changed, said = bytearray(sound), ""
            for field in rng.sample(fields, rng.choice([1, 1, 1, 2, 3])):
                size = struct.calcsize(field.form)
                old = int.from_bytes(sound[field.at : field.at + size], "little")
                new = rng.choice([*_NUMBERS, old + 1, old - 1, old * 2, old // 2, rng.randrange(64)])
                changed[field.at : field.at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
                said += f" {field.at}: {old} → {new}"
            content = bytes(changed)
        path.write_bytes(content)
        return said

    return mutate, path


# JSON ----------------------------------------------------------------------------------------------------


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every entry of a JSON value; of long lists and objects, some."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [at] if at else []
    for key, each in list(inner)[:12]:
        found += _places(each, (*at, key))
    return found


def _changed(rng: random.Random, sound: Any, values: tuple[Any, ...] = _VALUES) -> tuple[Any, str]:
    """One to three entries are others, twice there, or missing."""
    found, said = deepcopy(sound), ""
    for _ in range(rng.choice([1, 1, 2, 3])):
        place = rng.choice(_places(found) or [()])
        if not place:
            break
        inside = found
        for key in place[:-1]:
            inside = inside[key]
        key, old = place[-1], inside[place[-1]]
        what = rng.random()
        if what < 0.15:
            del inside[key]
            said += f" {place} gone"
            continue
        new = rng.choice(values)
        if isinstance(old, int) and not isinstance(old, bool) and what < 0.5:
            new = rng.choice([old + 1, old - 1, old * 2, -old, *_NUMBERS])
        if isinstance(inside, list) and what > 0.9:
            inside.insert(rng.randrange(len(inside) + 1), deepcopy(rng.choice(inside)))
        else:
            inside[key] = deepcopy(new)
        said += f" {place} = {new!r:.40}"
    return found, said


def _json(path: Path, sound: Any) -> Callable[[random.Random], str]:
    text = json.dumps(sound).encode()

    def mutate(rng: random.Random) -> str:
        if rng.random() < 0.5:
            content, said = _damaged(rng, text, len(text))
        else:
            found, said = _changed(rng, sound)
            content = json.dumps(found).encode()
        path.write_bytes(content)
        return said

    return mutate


def _safetensors(folder: Path) -> tuple[Callable[[random.Random], str], Path]:
    """The headers of two parts, and the index that names them."""
    made = folder_of(write_tiny(folder / "tiny.gguf", "llama"), folder / "folder", parts=2)
    index = made / "model.safetensors.index.json"
    of_index = _json(index, json.loads(index.read_text(encoding="utf-8")))
    part = made / "model-00001-of-00002.safetensors"
    sound, sound_index = part.read_bytes(), index.read_bytes()
    length = int.from_bytes(sound[:8], "little")
    entries, data = json.loads(sound[8 : 8 + length]), sound[8 + length :]
    values = (*_VALUES, "F32", "BF16", "I64", "U8", "F8_E4M3", [0, 4], [64, 64], [1 << 40, 1 << 40], [-1])

    def mutate(rng: random.Random) -> str:
        if rng.random() < 0.3:
            part.write_bytes(sound)
            return f"index: {of_index(rng)}"
        index.write_bytes(sound_index)
        if rng.random() < 0.5:
            content, said = _damaged(rng, sound, 8 + length)
        else:
            found, said = _changed(rng, entries, values)
            text = json.dumps(found).encode()
            content = len(text).to_bytes(8, "little") + text + data
        part.write_bytes(content)
        return said

    return mutate, made


def _config(folder: Path) -> tuple[Callable[[random.Random], str], Path]:
    """config.json, which also says how weights are quantised."""
    made = folder_of(write_tiny(folder / "tiny.gguf", "llama"), folder / "folder")
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config |= {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "beta_fast": 16.0}}
    config |= {"layer_types": ["full_attention"] * config["num_hidden_layers"], "tie_word_embeddings": True}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return _json(made / "config.json", config), made


def _scan_configs(folder: Path) -> tuple[Callable[[random.Random], str], Path]:
    """Of layers with selective scans."""
    names = ("nemotron_h_moe", "falcon-h1", "granitehybrid")
    made = {name: write_folder(folder / name, recorded(name)) for name in names}
    path = next(iter(made.values()))
    configs = {name: json.loads((each / "config.json").read_text(encoding="utf-8")) for name, each in made.items()}
    mutations = {name: _json(path / "config.json", config) for name, config in configs.items()}
    weights = {name: (each / "model.safetensors").read_bytes() for name, each in made.items()}

    def mutate(rng: random.Random) -> str:
        name = rng.choice(names)
        (path / "model.safetensors").write_bytes(weights[name])
        return f"{name}: {mutations[name](rng)}"

    return mutate, path


# Tokenizers ----------------------------------------------------------------------------------------------

_SPLIT = {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\s+|[^\\s]"}, "behavior": "Isolated", "invert": False}
# A table of characters that replaces none: the size of a tree, the tree, texts.
_TABLE = {"type": "Precompiled", "precompiled_charsmap": b64encode(struct.pack("<257I", 1024, *[0] * 256)).decode()}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _vocabularies(given: dict[str, Any]) -> list[dict[str, Any]]:
    """A byte-level BPE, a BPE with byte fallback and rules for spaces, and a unigram model."""
    texts = [f"<0x{i:02X}>" for i in range(240)] + ["▁", "the", "inn", ",", *"abcde"]
    added = [{**each, "id": 255 + i} for i, each in enumerate(given["added_tokens"])]
    bos = {"SpecialToken": {"id": added[0]["content"], "type_id": 0}}
    framing = {"type": "TemplateProcessing", "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}], "pair": []}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    spaces = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": None,
        "post_processor": framing,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, _STRIP]},
    }
    options = {"byte_fallback": True, "unk_token": "<0x00>", "fuse_unk": True, "dropout": None}
    pairs = {"type": "BPE", "vocab": {text: i for i, text in enumerate([*texts, "▁the"])}, "merges": [["▁", "the"]]}
    unigram: dict[str, Any] = {
        "type": "Unigram",
        "unk_id": 0,
        "vocab": [[text, -float(i)] for i, text in enumerate(texts)],
    }
    bytes_ = deepcopy(given) | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_SPLIT, _BYTES]}}
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return [
        given,
        bytes_,
        {**spaces, "model": {**pairs, **options}},
        {**spaces, "normalizer": {"type": "NFKC"}, "pre_tokenizer": metaspace, "model": unigram},
        {
            **spaces,
            "normalizer": _TABLE,
            "pre_tokenizer": metaspace,
            "model": {**unigram, "vocab": unigram["vocab"][230:]},
        },
    ]


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _tokenizer(folder: Path) -> tuple[Callable[[random.Random], str], Path]:
    made = folder_of(write_tiny(folder / "tiny.gguf", "llama"), folder / "folder")
    path = made / "tokenizer.json"
    mutations = []
    for each in _vocabularies(json.loads(path.read_text(encoding="utf-8"))):
        path.write_text(json.dumps(each), encoding="utf-8")
        problem = attempt(made)
        assert problem is None, problem
        mutations.append(_json(path, each))
    sound = {name: (made / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    config = {"eos_token": {"content": "<|im_end|>"}, "add_bos_token": True, "chat_template": [{"name": "default"}]}
    config["added_tokens_decoder"] = {"262": {"content": "<x>", "special": True}}
    beside = [_json(made / "tokenizer_config.json", config)]
    beside.append(_json(made / "generation_config.json", {"eos_token_id": [3, 4], "bos_token_id": 1}))

    def mutate(rng: random.Random) -> str:
        for name, content in sound.items():
            (made / name).write_bytes(content)
        return rng.choice(mutations if rng.random() < 0.8 else beside)(rng)

    return mutate, made


KINDS: Mapping[str, Callable[[Path], tuple[Callable[[random.Random], str], Path]]] = {
    "gguf": _gguf,
    "scans": _scans,
    "safetensors": _safetensors,
    "config": _config,
    "configs of scans": _scan_configs,
    "tokenizer": _tokenizer,
}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
