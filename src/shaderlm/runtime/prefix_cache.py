"""Pages of sequences that are over, kept for those that begin with the same tokens. Knows neither GPU nor arrays.

A tree: a node is a page with the token ids whose keys and values it holds, and its parent is the page before it. A node
is found by comparing ids from position 0 on, so that a match is exact. A page that is not full has no children. The
cache is one user of each of its pages; a page that has no other user may be given back, the least recently used first.
Only pages whose tokens are all known may be inserted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..graph.batch import PAGE
from .pages import PagePool, pages_for

_COMPARED = 16  # children of a node that a page is compared with token by token, the newest first


@dataclass(eq=False)
class _Node:
    ids: tuple[int, ...]
    page: int
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """Pages that hold the first `length` tokens of a prompt. Of the last one, perhaps only the beginning."""

    pages: tuple[int, ...] = ()
    length: int = 0


class PrefixCache:
    """Which pages hold the beginnings of prompts. Its owner locks the pool."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = _Node((), -1, None)
        # By page, the least recently used first. A node is older than its parent unless it was in use meanwhile.
        self._nodes: OrderedDict[int, _Node] = OrderedDict()
        self.queries = self.hits = self.evicted = 0  # tokens that were looked up and found; pages given back

    @property
    def pages(self) -> int:
        """How many pages are kept."""
        return len(self._nodes)

    @property
    def idle_pages(self) -> int:
        """How many of them no sequence uses."""
        return sum(self._pool.users(page) == 1 for page in self._nodes)

    def match(self, ids: Sequence[int], multiple: int = 1) -> Match:
        """The longest cached prefix of a prompt: a multiple of so many tokens, and less than the whole prompt.

        The last token must be run: its logits are wanted.
        """
        limit = (len(ids) - 1) // multiple * multiple
        node, found, length = self._root, list[_Node](), 0
        while length + PAGE <= limit:
            child = node.children.get(tuple(ids[length : length + PAGE]))
            if child is None:
                break
            node = child
            found.append(node)
            length += PAGE
        best, common = None, 0
        if multiple < PAGE:
            wanted = tuple(ids[length : min(limit, length + PAGE)])
            for child in list(reversed(node.children.values()))[:_COMPARED]:
                shared = _common(child.ids, wanted) // multiple * multiple
                if shared > common:
                    best, common = child, shared
        if best is not None:
            found.append(best)
        length = (length + common) // multiple * multiple
        del found[pages_for(length) :]
        if found:
            self._touch(found[-1])
        return Match(tuple(node.page for node in found), length)

    def count(self, queries: int, hits: int) -> None:
        """A prompt of so many tokens was looked up, and so many of them need not be computed."""
        self.queries += queries
        self.hits += hits

    def insert(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        """These tokens are in these pages, of a sequence that goes on or is over. What is known already is kept."""
        node = self._root
        for i, page in enumerate(pages[: pages_for(len(ids))]):
            key = tuple(ids[i * PAGE : (i + 1) * PAGE])
            child = node.children.get(key)
            if child is None:
                if page in self._nodes:  # of another sequence, which was shared and is written to no more
                    break
                child = self._nodes[page] = node.children[key] = _Node(key, page, node)
                self._pool.retain((page,))
                self._drop_beginnings(node, key)
            node = child
            if len(key) < PAGE:
                break
        if node is not self._root:
            self._touch(node)

    def _drop_beginnings(self, parent: _Node, key: tuple[int, ...]) -> None:
        """Pages that hold less of the same are not needed any more."""
        for other in list(parent.children.values())[-_COMPARED:]:
            if len(other.ids) < len(key) and key[: len(other.ids)] == other.ids:
                self._remove(other)

    def give_up(self, pages: Iterable[int]) -> None:
        """Let go of pages, and of all that comes after them. Who uses them keeps them, and may write to them."""
        for page in pages:
            first = self._nodes.get(page)
            left = [first] if first is not None else []
            while left:
                node = left.pop()
                left += node.children.values()
                self._remove(node)

    def evict(self) -> bool:
        """Give the least recently used page back that no sequence uses; False if there is none.

        Pages that nothing follows go first. What follows the last of them belongs to sequences with pages of their own
        for the same beginning, and is not found any more.
        """
        users = self._pool.users
        page = next((page for page, node in self._nodes.items() if not node.children and users(page) == 1), None)
        if page is None:
            page = next((page for page in self._nodes if users(page) == 1), None)
        if page is None:
            return False
        self.give_up([page])
        self.evicted += 1
        return True

    def reclaim(self, pages: int) -> None:
        """Give back so many pages, or all that no sequence uses."""
        while pages > 0 and self.evict():
            pages -= 1

    def clear(self) -> None:
        """Forget everything."""
        self._pool.release(list(self._nodes))
        self._nodes.clear()
        self._root.children.clear()

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.ids], self._nodes[node.page]
        self._pool.release((node.page,))

    def _touch(self, node: _Node) -> None:
        """It and those before it were used; the first page last, so that it goes last."""
        at: _Node | None = node
        while at is not None and at is not self._root:
            self._nodes.move_to_end(at.page)
            at = at.parent


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first values are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
