"""The prefix cache's index: from runs of tokens to the blocks that hold their keys and values.

Each edge is the tokens of one full block, so a path from the root spells a prefix, one block at a time::

    root ── ("", 5, 9, 2, 7) ── block 3 ── (1, 1, 4, 0) ── block 8
        │                              └── (6, 6, 6, 6) ── block 2
        ├── ("", 5, 9, 2, 8) ── block 5
        └── ("tenant", 5, 9, 2, 7) ── block 1

Keys and values depend on every token before them, which is why a block is found by its whole path and never
by its own tokens alone. The first edge starts with the salt, which gives each salt a subtree of its own: what
one tenant caches, no other can find.

All walks are loops: a prefix of 32,768 tokens may be that many nodes deep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

Edge = tuple[int | str | None, ...]


class Node:
    """A cached block, as the end of the path that leads to it. The root holds no block."""

    __slots__ = ("block", "children", "depth", "edge", "parent")

    def __init__(self, edge: Edge, block: int, parent: Node | None) -> None:
        self.edge = edge
        self.block = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks on the path from the root, this one included."""
        self.children: dict[Edge, Node] = {}

    def path(self) -> list[int]:
        """The blocks from the root to here."""
        blocks = []
        node = self
        while node.parent is not None:
            blocks.append(node.block)
            node = node.parent
        blocks.reverse()
        return blocks


class RadixTree:
    """Cached blocks by prefix, with the idle ones in the order in which they may be given up.

    A block is *idle* when no sequence holds it; ``rest`` and ``wake`` tell the tree when that changes.

    Whoever holds a block holds every block above it, and gives them back deepest first. So among idle
    blocks a child always went to rest before its parent, and the one that has rested longest is a leaf:
    ``evict`` takes it from the front of a queue and never searches.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node((), -1, None)
        self.node_of: dict[int, Node] = {}
        self.idle: OrderedDict[int, Node] = OrderedDict()

    def edge(self, tokens: list[int | None], index: int, salt: str) -> Edge:
        """The edge that stands for the tokens of block number ``index``."""
        start = index * self.block_size
        edge = tuple(tokens[start : start + self.block_size])
        return edge if index else (salt, *edge)

    def find(self, tokens: list[int | None], num_blocks: int, salt: str, start: Node | None = None) -> Node:
        """The end of the longest cached prefix of ``tokens``, at most ``num_blocks`` deep; the root if there is none.

        ``start`` is what an earlier search for the same prefix found: only what changed since then is looked at.
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

    def insert(self, parent: Node, edge: Edge, block: int) -> Node:
        """Put ``block``, which some sequence holds, below ``parent``."""
        node = parent.children[edge] = self.node_of[block] = Node(edge, block, parent)
        return node

    def rest(self, block: int) -> bool:
        """Nobody holds ``block`` any more; says whether the tree keeps it."""
        node = self.node_of.get(block)
        if node is None:
            return False
        self.idle[block] = node
        return True

    def wake(self, block: int) -> None:
        """The idle ``block`` is held again."""
        del self.idle[block]

    def evict(self) -> int:
        """Forget the idle block that has rested longest, and return it; there must be one."""
        block, node = self.idle.popitem(last=False)
        assert node.parent is not None
        assert not node.children, "a child must go to rest before its parent"
        del node.parent.children[node.edge]
        del self.node_of[block]
        return block

    def walk(self) -> Iterator[Node]:
        """Every node that holds a block, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
