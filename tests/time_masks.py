"""How long masks of constrained generations take: `python -m tests.time_masks [MODEL.gguf …]`, times in µs.

Texts are drawn at random from what the masks allow. Without a model: a vocabulary of 128,000 tokens made of GPT-2's.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shaderlm import Tokenizer
from shaderlm.engine.constraints import GrammarCompiler
from shaderlm.engine.structured import structure_of
from shaderlm.text.vocabulary import NORMAL

VOCABULARY = Path(__file__).parent / "data" / "vocab" / "gpt-2.gguf"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CASES: dict[str, dict[str, Any]] = {
    "any JSON object": {"response_format": {"type": "json_object"}},
    "JSON schema": {"json_schema": PERSON},
    "regex": {"regex": r"[A-Z][a-z]+( [a-z]+){3,40}\."},
    "GBNF": {"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z]+ | [0-9]{1,4} | root'},
}
TEXTS, TOKENS = 20, 200


def large_vocabulary() -> Tokenizer:
    """GPT-2's tokens, and pairs of them."""
    small = Tokenizer.from_file(VOCABULARY).vocabulary
    rng, known = random.Random(0), set(small.tokens)
    tokens = list(small.tokens)
    while len(tokens) < 128_000:
        pair = rng.choice(small.tokens[:20_000]) + rng.choice(small.tokens[:2_000])
        if len(pair) < 20 and pair not in known:
            known.add(pair)
            tokens.append(pair)
    types = [*small.types, *[NORMAL] * (len(tokens) - len(small.types))]
    return Tokenizer(replace(small, tokens=tokens, types=types))


def measure(tokenizer: Tokenizer) -> None:
    size = len(tokenizer.vocabulary.tokens)
    compiler, begun = GrammarCompiler(tokenizer, size), time.perf_counter()
    tokenizer_seconds = 0.0
    print(f"{size:,} tokens")
    print(f"{'':16} {'compile':>9} {'start':>7} {'mask p50':>9} {'p90':>7} {'p99':>7} {'max':>7} {'accept p50':>11}")
    for name, options in CASES.items():
        structure = structure_of(options)
        assert structure is not None
        if not tokenizer_seconds:
            assert compiler._guidance
            tokenizer_seconds = time.perf_counter() - begun
        begun = time.perf_counter()
        grammar = compiler.of_structure(structure)
        compiled = time.perf_counter() - begun
        masks, accepts, starts = [], [], []
        for seed in range(TEXTS):
            rng = np.random.default_rng(seed)
            begun = time.perf_counter()
            constraint = grammar.start()
            starts.append(time.perf_counter() - begun)
            for _ in range(TOKENS):
                begun = time.perf_counter()
                mask = constraint.mask()
                masks.append(time.perf_counter() - begun)
                if mask is None:
                    break
                allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
                token = int(rng.choice(allowed))
                begun = time.perf_counter()
                going = constraint.accept(token)
                accepts.append(time.perf_counter() - begun)
                if going is False:
                    break
        p50, p90, p99, most = (1e6 * value for value in np.percentile(masks, [50, 90, 99, 100]))
        first = f"{1e6 * compiled:9,.0f} {1e6 * np.median(starts):7,.0f}"
        print(f"{name:16} {first} {p50:9,.0f} {p90:7,.0f} {p99:7,.0f} {most:7,.0f} {1e6 * np.median(accepts):11,.0f}")
    print(f"making llguidance's tokenizer took {1e3 * tokenizer_seconds:.0f} ms")


if __name__ == "__main__":
    for path in sys.argv[1:]:
        measure(Tokenizer.from_file(path))
    if not sys.argv[1:]:
        measure(large_vocabulary())
