"""What requests have in common: hashes of the whole pages that their prompts begin with, within one API key.

A page is 512 bytes of the prompt as it was sent: about the 128 tokens that a page of the KV cache has. The ingress has
no tokenizer and no template: both take milliseconds and memory for each model. Prompts whose pages are equal here have
equal tokens as well, all but those at the border, and that is all that a choice of a replica needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

PAGE_BYTES = 512
# Pages after which a hash is taken. Their distance grows with the prompt, so that a router remembers a few hashes of
# each, and a turn of a conversation still begins with most of the one before.
BOUNDARIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_MOST_BYTES = BOUNDARIES[-1] * PAGE_BYTES  # more is not hashed
# Fields of the routes' bodies that make the prompt, in the order in which templates write them.
_FIELDS = ("tools", "system", "instructions", "messages", "prompt", "input")


def prompt_bytes(body: Mapping[str, Any]) -> bytes:
    """The beginning of the prompt of a request's body, as bytes that begin alike where prompts do.

    Messages one by one: a longer conversation begins like a shorter one. What is nested too deep ends it.
    """
    parts: list[bytes] = []
    size, todo = 0, [body[name] for name in reversed(_FIELDS) if body.get(name) is not None]
    while todo and size <= _MOST_BYTES:
        value = todo.pop()
        if isinstance(value, list):
            todo.extend(reversed(value))
            continue
        try:
            part = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else msgspec.json.encode(value)
        except RecursionError:
            break
        parts.append(part)
        size += len(part) + 1
    return b"\n".join(parts)


def page_hashes(prompt: bytes, client: str | None, model: str) -> list[int]:
    """Hashes of its first 1, 2, 3, 4, 6, … whole pages, the longest last. None if it has no whole page."""
    return list(_hashes(prompt, client, model))


def _hashes(prompt: bytes, client: str | None, model: str) -> Iterator[int]:
    state, done = _hasher("page", client, model), 0
    for boundary in BOUNDARIES:
        end = boundary * PAGE_BYTES
        if end > len(prompt):
            return
        state.update(prompt[done:end])
        done = end
        yield int.from_bytes(state.digest(), "little")


def session_hash(session: str, client: str | None, model: str) -> int:
    """The hash of a session that a client names."""
    state = _hasher("session", client, model)
    state.update(session.encode("utf-8", "surrogatepass"))
    return int.from_bytes(state.digest(), "little")


def _hasher(kind: str, client: str | None, model: str) -> Any:
    """Hashes of different clients, models and kinds have nothing in common."""
    return hashlib.blake2b(msgspec.json.encode([kind, client, model]), digest_size=8)
