"""The prefix cache's index: from token prefixes to the blocks that hold their keys and values.

Each edge is the tokens of one full block, so a path from the root spells a prefix, one block at a time::

    root ── ("", 5, 9, 2, 7) ── block 3 ── (1, 1, 4, 0) ── block 8
        │                              └── (6, 6, 6, 6) ── block 2
        ├── ("", 5, 9, 2, 8) ── block 5
        └── ("tenant", 5, 9, 2, 7) ── block 1

Keys and values depend on every token before them, so a block is identified by its complete path, not by its own
tokens alone. The first edge starts with the salt, which gives each salt a subtree of its own: blocks cached under
one salt cannot be found under another.

All walks are loops: a prefix of 32,768 tokens may be that many nodes deep.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several

from octavo.cache.eviction import IdleBlocks
from octavo.cache.kv_events import KVEvents
from octavo.cache.node import Edge, Node, User
from octavo.cache.pinned_blocks import PinnedBlocks
from octavo.types import Tokens


class RadixTree:
    """Cached blocks by prefix, with the idle ones in eviction order.

    A block is *idle* when no sequence holds it; ``rest`` and ``wake`` report changes to the tree.

    A sequence that holds a block holds every block above it, and releases them deepest first. So a child of an idle
    block is idle, there is always a leaf among idle blocks, and ``evict`` never searches.

    With a sliding window that does not hold: sequences free their first blocks while they hold later ones, and later
    blocks match without the first. Then any idle block may be evicted; its node stays while paths lead through it.
    """

    def __init__(
        self,
        block_size: int,
        eviction: str = "lru",
        num_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
        events: KVEvents | None = None,
        has_window: bool = False,
    ) -> None:
        self.block_size = block_size
        self.has_window = has_window
        self.root = Node((), -1, None)
        self.node_of: dict[int, Node] = {}
        self.idle = IdleBlocks(eviction, num_blocks, leaves_only=not has_window)
        self.pinned = PinnedBlocks(self.idle, num_blocks, clock)
        self.num_born = 0
        self.events = events
        self.on_insert: Callable[[Node], None] | None = None
        self.on_evict: Callable[[Node], None] | None = None
        self.on_evicted: Callable[[], None] = lambda: None
        """Called behind one or several calls of ``on_evict``, before anything is written to these blocks."""
        """Called with each evicted node, while its block still has its content."""

    def edge(self, tokens: Tokens, index: int, salt: str) -> Edge:
        """The edge of the tokens in block number ``index``."""
        start = index * self.block_size
        edge = tuple(tokens[start : start + self.block_size])
        return edge if index else (salt, *edge)

    def find(self, tokens: Tokens, num_blocks: int, salt: str, start: Node | None = None) -> Node:
        """The last node of the longest cached prefix of ``tokens``, at most ``num_blocks`` deep; the root if there is
        none.

        ``start`` is the result of an earlier search for the same prefix, from which this one resumes.
        """
        node = start or self.root
        while node.parent is not None and self.node_of.get(node.block) is not node:  # evicted since then
            node = node.parent
        for index in range(node.depth, num_blocks):
            child = node.children.get(self.edge(tokens, index, salt))
            if child is None:
                break
            node = child
        return node

    def nearest(self, node: Node, tokens: Tokens, limit: int, salt: str) -> tuple[int, int]:
        """The child block of ``node`` that shares the most first tokens with what follows in ``tokens``, and their
        number; (-1, 0) if none shares any.

        At most ``limit`` tokens, less than a block, are compared. Edges are sorted, so the edge with the longest common
        prefix is next to the insertion point.
        """
        num_salts = int(not node.depth)
        key = self.edge(tokens, node.depth, salt)[: limit + num_salts]
        index = bisect_left(node.edges, key)
        best, most = -1, 0
        for edge in node.edges[max(index - 1, 0) : index + 1]:
            num_equal = _num_equal(edge, key) - num_salts
            if num_equal > most and node.children[edge].block >= 0:
                best, most = node.children[edge].block, num_equal
        return best, most

    def find_recent(self, tokens: Tokens, num_blocks: int, salt: str, num_behind: Callable[[int], int]) -> list[Node]:
        """The last nodes of all prefixes of ``tokens``, at most ``num_blocks`` deep and the root first, of which all
        but the first ``num_behind(n)`` of ``n`` blocks are cached."""
        node = self.root
        ends = [node]
        num_there = 0
        for index in range(num_blocks):
            child = node.children.get(self.edge(tokens, index, salt))
            if child is None:
                break
            node = child
            num_there = num_there + 1 if node.block >= 0 else 0
            if num_there and num_there >= node.depth - num_behind(node.depth):  # a node without a block may be pruned
                ends.append(node)
        return ends

    def insert(self, parent: Node, edge: Edge, block: int, user: User) -> Node:
        """Insert ``block``, which a sequence of ``user`` holds, at ``edge`` of ``parent``, where no block is cached."""
        self.num_born += 1
        node = parent.children.get(edge)
        if node is None:
            insort(parent.edges, edge)
            node = parent.children[edge] = Node(edge, block, parent)
        else:
            node.uses += 1
        node.block, node.born, node.only_user = block, self.num_born, user
        self.node_of[block] = node
        if self.events is not None:
            self.events.stored(node)
        if self.on_insert is not None:
            self.on_insert(node)
        return node

    def move_end(self, before: Node | None, now: Node | None) -> None:
        """Move the end of a sequence's published path from ``before`` to ``now``; ``None`` means no path."""
        if now is not None:
            now.num_ends += 1
        if before is not None:
            before.num_ends -= 1
            self._prune(before)

    def _prune(self, node: Node) -> None:
        """Remove ``node`` if it has no block and no path leads through it or ends there, then likewise its parents."""
        while node.parent is not None and node.block < 0 and not node.children and not node.num_ends:
            parent = node.parent
            if node.place is not None:
                node.place.move(parent)
            del parent.children[node.edge]
            del parent.edges[bisect_left(parent.edges, node.edge)]
            node = parent

    def rest(self, block: int, is_passed: bool = False) -> bool:
        """Record that no sequence holds ``block`` any more, with ``is_passed`` because it is behind a window; returns
        whether the tree keeps it."""
        node = self.node_of.get(block)
        if node is None:
            return False
        node.is_passed = is_passed and node.uses == 1
        self.idle.add(node)
        return True

    def wake(self, block: int) -> None:
        """Record that the idle ``block`` is held again."""
        self.idle.remove(self.node_of[block])

    def evict(self) -> int:
        """Evict the first idle block in the policy's order, and return it; there must be one."""
        self.pinned.expire()
        return self._evict(self.idle.pop())

    def cut(self, node: Node, user: User) -> list[int]:
        """Evict the path to ``node``, from its end up to where another path leaves it, a sequence holds it, another
        API key pinned it, or a request other than those of ``user`` used it; returns its blocks."""
        blocks, owners = [], (None, user[0])
        while node.is_idle and not node.children and node.keeper in owners and node.only_user == user:
            parent = node.parent
            assert parent is not None
            self.idle.remove(node)
            blocks.append(self._evict(node))
            node = parent
        return blocks

    def _evict(self, node: Node) -> int:
        block, parent = node.block, node.parent
        assert parent is not None
        assert self.has_window or not node.children, "only leaves can be evicted"
        if self.on_evict is not None:
            self.on_evict(node)
        if self.events is not None:
            self.events.removed(node)
        self.pinned.unpin(node)
        del self.node_of[block]
        node.block = -1
        self._prune(node)
        if parent.is_idle and not parent.children and parent.entry is None:
            self.idle.place(parent)
        return block

    def supersede(self, node: Node, path: list[int]) -> None:
        """Mark the path to ``node`` as superseded by the blocks of ``path``, as far as it is not part of it."""
        while node.parent is not None and self.node_of.get(node.block) is node:
            on_path = node.depth <= len(path) and path[node.depth - 1] == node.block
            if on_path or not all(child.is_superseded for child in node.children.values()):
                break
            node.is_superseded = True
            self.idle.place_again(node)
            node = node.parent

    def use(self, node: Node, user: User) -> None:
        """Record that a sequence of ``user`` matched the path to ``node``."""
        while node.parent is not None:
            node.uses += 1
            if node.only_user != user:
                node.only_user = None
            node.is_superseded = False
            node = node.parent

    def walk(self) -> Iterator[Node]:
        """All nodes except the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self, refs: Several[int], ends: Counter[Node]) -> None:
        """Assert that nodes, blocks and idle blocks are consistent, given the number of sequences that hold each block,
        and of published paths that end at each node. Costs O(pool)."""
        idle: set[Node] = set()
        in_tree: set[int] = set()
        for node in self.walk():
            above = node.parent
            assert above is not None
            assert len(node.edge) == self.block_size + (above is self.root), "a block was cached before it was full"
            assert node.depth == above.depth + 1, "depths do not count up"
            assert node.num_ends == ends.get(node, 0), "published paths are miscounted"
            if node.block < 0:
                assert self.has_window, "a block was evicted before its children"
                assert node.children or node.num_ends, "a node without a block was not pruned"
                assert not node.is_idle, "a node without a block is idle"
                continue
            assert self.node_of.get(node.block) is node, "tree and block index disagree"
            assert node.is_idle == (refs[node.block] == 0), "a held block is idle, or an idle one is not"
            in_tree.add(node.block)
            if node.is_idle:
                idle.add(node)
            if above is not self.root and not self.has_window:
                assert refs[above.block] >= refs[node.block], "a parent is held by fewer than its child"
                assert node.is_idle or not above.is_idle, "an idle block has a child that is held"
        assert in_tree == self.node_of.keys(), "a cached block cannot be reached from the root"
        assert len(idle) == len(self.idle), "idle blocks are miscounted"
        self.idle.check({node for node in idle if self.has_window or not node.children})
        self.pinned.check({self.node_of[block] for block in in_tree})


def _num_equal(one: Edge, other: Edge) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
