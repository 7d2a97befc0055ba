"""Pages of sequences that are over, kept for those that begin with the same tokens. Knows neither GPU nor arrays.

A tree for each client: a node is a page with the token ids whose keys and values it holds, and its parent is the page
before it. A node is found by comparing ids from position 0 on, so that a match is exact. A page that is not full has no
children. The cache is one user of each of its pages; a page that has no other user may be given back, the one that was
used least recently first. Only pages whose tokens are all known may be inserted.

Of a model with states, a sequence begins only where a node has a snapshot: `insert` hands it over, and it goes with the
node, or when rows are scarce, the one that is worth least (`PrefixCache.evict_snapshot`).

A client finds only what it has put in. Otherwise it could learn the prompts of others: a guess that is found costs
less, and the answer says so.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field

from ..graph.batch import PAGE
from .pages import PagePool, pages_for
from .states import StatePool

_COMPARED = 16  # children of a node that a page is compared with token by token, the newest first


@dataclass(eq=False)
class PrefixNode:
    """A page in the tree of a client. Others keep one only to hand it to `PrefixCache.insert`."""

    ids: tuple[int, ...]
    page: int
    parent: PrefixNode | None  # None: a root, or a node that is not in the tree any more
    depth: int  # pages from position 0 to its end
    children: dict[tuple[int, ...], PrefixNode] = field(default_factory=dict)
    state: int | None = None  # a snapshot after its last token
    used: int = 0  # `PrefixCache._lost_pages` when the snapshot was taken or used


@dataclass(frozen=True)
class Match:
    """Pages that hold the first `length` tokens of a prompt. Of the last one, perhaps only the beginning."""

    pages: tuple[int, ...] = ()
    length: int = 0
    state: int | None = None  # the snapshot after them, of a model with states
    reach: int = 0  # tokens of the prompt that are cached in whole pages, though perhaps no snapshot is after them


class PrefixCache:
    """Which pages hold the beginnings of prompts. Its owner locks the pool."""

    def __init__(self, pool: PagePool, states: StatePool | None = None) -> None:
        """`states`: of a model that has some."""
        self._pool, self._states = pool, states
        self._snapshots: OrderedDict[int, PrefixNode] = OrderedDict()  # the longest unused first
        self._lost_pages = 0  # what the snapshot that went last was worth
        self._roots: dict[Hashable, PrefixNode] = {}  # by client
        self._nodes: dict[int, PrefixNode] = {}  # by page
        self.age = 0  # how often it was emptied: pages of another age may hold anything
        self.queries = self.hits = self.evicted = 0  # tokens that were looked up and found; pages given back

    def match(self, ids: Sequence[int], multiple: int = 1, client: Hashable = None) -> Match:
        """The longest cached prefix of a client's prompt: a multiple of so many tokens, and less than the whole prompt.

        The last token must be run: its logits are wanted.
        """
        node = self._roots.get(client)
        if node is None:
            return Match()
        limit = (len(ids) - 1) // multiple * multiple
        nodes, length = list[PrefixNode](), 0
        while length + PAGE <= limit:
            child = node.children.get(tuple(ids[length : length + PAGE]))
            if child is None:
                break
            node = child
            nodes.append(node)
            length += PAGE
        if self._states is not None:
            return self._with_snapshot(nodes, multiple)
        best, common = None, 0
        if multiple < PAGE:
            following = tuple(ids[length : min(limit, length + PAGE)])
            for child in list(reversed(node.children.values()))[:_COMPARED]:
                shared = _common(child.ids, following) // multiple * multiple
                if shared > common:
                    best, common = child, shared
        if best is not None:
            nodes.append(best)
        length = (length + common) // multiple * multiple
        del nodes[pages_for(length) :]
        self._touch(nodes)
        return Match(tuple(node.page for node in nodes), length)

    def _with_snapshot(self, nodes: list[PrefixNode], multiple: int) -> Match:
        """The longest of these beginnings that ends with a snapshot."""
        reach = len(nodes) * PAGE // multiple * multiple
        while nodes and (nodes[-1].state is None or nodes[-1].depth * PAGE % multiple):
            nodes.pop()
        if not nodes:
            return Match(reach=reach)
        state = nodes[-1].state
        assert state is not None
        self._snapshots.move_to_end(state)
        nodes[-1].used = self._lost_pages
        self._touch(nodes)
        return Match(tuple(node.page for node in nodes), nodes[-1].depth * PAGE, state, reach)

    def evict_snapshot(self) -> bool:
        """Give the row back of the snapshot that is worth least; False if there is none.

        It is worth the pages that are read again without it, and what the last one was worth that had gone when it was
        used (GreedyDual): those near the end of a prompt go before one that is far from any other, and that one goes,
        too, once it is not used any more. Of equals the one goes that was not used for longest.
        """
        if not self._snapshots:
            return False
        node = min(self._snapshots.values(), key=self._worth)
        self._lost_pages = max(self._lost_pages, self._worth(node))
        self._drop_snapshot(node)
        return True

    @staticmethod
    def _worth(node: PrefixNode) -> int:
        before = node.parent
        while before is not None and before.state is None:
            before = before.parent
        return node.used + node.depth - (before.depth if before is not None else 0)

    def _drop_snapshot(self, node: PrefixNode) -> None:
        row, node.state = node.state, None
        if row is not None:
            assert self._states is not None
            del self._snapshots[row]
            self._states.release(row)

    def _take_snapshot(self, node: PrefixNode, snapshots: MutableMapping[int, int]) -> None:
        """What is known already is kept: the caller gives a second one back."""
        if node.state is None and (row := snapshots.pop(node.depth * PAGE, None)) is not None:
            node.state, node.used = row, self._lost_pages
            self._snapshots[row] = node

    def pages_of(self, ids: Sequence[int], client: Hashable = None) -> list[int]:
        """The cached pages of whole pages of these tokens, from the first on. Looking says nothing about their use."""
        node, pages = self._roots.get(client), list[int]()
        for first in range(0, len(ids) // PAGE * PAGE, PAGE):
            node = None if node is None else node.children.get(tuple(ids[first : first + PAGE]))
            if node is None:
                break
            pages.append(node.page)
        return pages

    def snapshots_of(self, ids: Sequence[int], client: Hashable = None) -> dict[int, int]:
        """Rows of the snapshots along the cached pages of these tokens, by how many pages they stand for."""
        node, rows = self._roots.get(client), dict[int, int]()
        for first in range(0, len(ids) // PAGE * PAGE, PAGE):
            node = None if node is None else node.children.get(tuple(ids[first : first + PAGE]))
            if node is None:
                break
            if node.state is not None:
                rows[node.depth] = node.state
        return rows

    def insert(
        self,
        ids: Sequence[int],
        pages: Sequence[int],
        length: int | None = None,
        client: Hashable = None,
        after: PrefixNode | None = None,
        snapshots: MutableMapping[int, int] | None = None,
    ) -> PrefixNode | None:
        """These tokens, or the first `length` of them, are in these pages, of a sequence that goes on or is over.

        What is known already is kept. The last page's node comes back, from which the same sequence may go on: as
        `after`, so that nothing is compared twice. `snapshots`: rows of the states by how many tokens they stand
        for; those that are kept are taken out.
        """
        length = len(ids) if length is None else length
        if after is None or after.parent is None:
            after = self._roots.setdefault(client, PrefixNode((), -1, None, 0))
        node, known = after, list[PrefixNode]()
        if snapshots and node.depth:
            self._take_snapshot(node, snapshots)
        for i in range(node.depth, pages_for(length)):
            key, page = tuple(ids[i * PAGE : min(length, (i + 1) * PAGE)]), pages[i]
            child = node.children.get(key)
            if child is not None:
                known.append(child)
            elif page in self._nodes:  # of another sequence, which was shared and is written to no more
                break
            else:
                child = self._nodes[page] = node.children[key] = PrefixNode(key, page, node, i + 1)
                self._pool.cache(page)
                self._drop_beginnings(node, key)
            node = child
            if snapshots:
                self._take_snapshot(node, snapshots)
            if len(key) < PAGE:
                break
        self._touch(known)
        return node if node.depth and len(node.ids) == PAGE else None

    def _touch(self, nodes: Sequence[PrefixNode]) -> None:
        """These were used just now; the first page last, so that it goes last."""
        for node in reversed(nodes):
            if node.page in self._pool.idle:
                self._pool.idle.move_to_end(node.page)

    def _drop_beginnings(self, parent: PrefixNode, key: tuple[int, ...]) -> None:
        """Pages that hold less of the same are not needed any more."""
        for other in list(parent.children.values())[-_COMPARED:]:
            if len(other.ids) < len(key) and key[: len(other.ids)] == other.ids:
                self._remove(other)

    def forget(self, ids: Sequence[int], client: Hashable = None) -> None:
        """Let go of the pages of these tokens, from the end on, up to where others begin like them."""
        node, path = self._roots.get(client), list[PrefixNode]()
        length = 0
        while node is not None and (child := node.children.get(tuple(ids[length : length + PAGE]))) is not None:
            path.append(child)
            node, length = child, length + PAGE
        if node is not None:
            rest = tuple(ids[length : length + PAGE])
            path += [each for each in node.children.values() if each.ids == rest[: len(each.ids)]]
        for each in reversed(path):
            if not each.children:
                self._remove(each)

    def give_up(self, pages: Iterable[int]) -> None:
        """Let go of pages, and of all that comes after them. Who uses them keeps them, and may write to them."""
        for page in pages:
            first = self._nodes.get(page)
            subtree = [first] if first is not None else []
            while subtree:
                node = subtree.pop()
                subtree += node.children.values()
                self._remove(node)

    def evict(self) -> bool:
        """Give the page back that has been idle for longest; False if there is none.

        Pages that nothing follows go first. What follows the last of them belongs to sequences with pages of their own
        for the same beginning, and is not found any more.
        """
        idle, nodes = self._pool.idle, self._nodes
        if not idle:
            return False
        page = next((page for page in idle if not nodes[page].children), next(iter(idle)))
        self.give_up([page])
        self.evicted += 1
        return True

    def reclaim(self, pages: int) -> None:
        """Give back so many pages, or all that no sequence uses."""
        while pages > 0 and self.evict():
            pages -= 1

    def clear(self) -> None:
        """Forget everything."""
        self.age += 1
        for node in self._nodes.values():
            node.parent = None
            self._drop_snapshot(node)
            self._pool.uncache(node.page)
        self._nodes.clear()
        self._roots.clear()

    def _remove(self, node: PrefixNode) -> None:
        parent, node.parent = node.parent, None
        assert parent is not None
        del parent.children[node.ids], self._nodes[node.page]
        self._drop_snapshot(node)
        self._pool.uncache(node.page)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first values are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
