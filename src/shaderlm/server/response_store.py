"""Responses that clients may go on from by their ids, while the server runs. Each key finds its own alone."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .errors import ApiError
from .types import responses as types

MAX_RESPONSES, MAX_BYTES = 256, 16 << 20  # of one key: the oldest go first


@dataclass(frozen=True)
class _Stored:
    parent: str | None  # the response before it
    items: bytes  # what was added to it: input and output, as JSON
    response: bytes  # the whole, as JSON

    @property
    def size(self) -> int:
        return len(self.items) + len(self.response)


class ResponseStore:
    """Keeps responses by key and id. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_client: dict[str | None, OrderedDict[str, _Stored]] = {}

    def add(
        self, client: str | None, parent: str | None, items: Sequence[types.InputItem], made: types.Response
    ) -> None:
        """A response that is over, with the items that were new in its request."""
        output = [msgspec.convert(msgspec.to_builtins(item), types.InputItem) for item in made.output]
        stored = _Stored(parent, msgspec.json.encode([*items, *output]), msgspec.json.encode(made))
        if stored.size > MAX_BYTES:  # pictures: it would take the place of all others, and find none
            return
        with self._lock:
            mine = self._by_client.setdefault(client, OrderedDict())
            mine[made.id] = stored
            while len(mine) > MAX_RESPONSES or sum(each.size for each in mine.values()) > MAX_BYTES:
                mine.popitem(last=False)

    def items(self, client: str | None, response_id: str) -> list[types.InputItem]:
        """All items of a conversation, up to this response and with it."""
        parts, next_id = list[bytes](), response_id
        with self._lock:
            mine = self._by_client.get(client, OrderedDict[str, _Stored]())
            while True:
                stored = mine.get(next_id)
                if stored is None:
                    raise _missing(response_id, "previous_response_id")
                mine.move_to_end(next_id)
                parts.append(stored.items)
                if stored.parent is None:
                    break
                next_id = stored.parent
        return [item for part in reversed(parts) for item in msgspec.json.decode(part, type=list[types.InputItem])]

    def response(self, client: str | None, response_id: str) -> bytes:
        """A response as it was sent."""
        with self._lock:
            stored = self._by_client.get(client, OrderedDict[str, _Stored]()).get(response_id)
        if stored is None:
            raise _missing(response_id, "response_id")
        return stored.response

    def remove(self, client: str | None, response_id: str) -> None:
        """Forget one. Those that go on from it cannot be continued any more."""
        with self._lock:
            if self._by_client.get(client, OrderedDict[str, _Stored]()).pop(response_id, None) is None:
                raise _missing(response_id, "response_id")


def _missing(response_id: str, param: str) -> ApiError:
    most = f"{MAX_RESPONSES} of a key, of {MAX_BYTES >> 20} MiB together,"
    kept = f"the last {most} are kept while the server runs, unless they had store: false"
    return ApiError(404, f"there is no response {response_id[:80]!r}; {kept}; send its items instead", param=param)
