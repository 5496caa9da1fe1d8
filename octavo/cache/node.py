"""A cached block as a node of the tree."""

from __future__ import annotations

from typing import Any

Edge = tuple[int | str | None, ...]


class Node:
    """A cached block, as the end of the path that leads to it. The root holds no block.

    Neither does a node whose block was given up before what is below it, see ``RadixTree``: ``block`` is negative then.
    """

    __slots__ = (
        *("block", "children", "depth", "edge", "edges", "key", "parent"),
        *("born", "entry", "hash", "is_idle", "is_passed", "is_protected", "is_superseded", "kept_until", "num_ends"),
        *("rested", "uses"),
    )

    def __init__(self, edge: Edge, block: int, parent: Node | None, born: int = 0) -> None:
        self.edge = edge
        self.block = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks on the path from the root, this one included."""
        self.children: dict[Edge, Node] = {}
        self.edges: list[Any] = []
        """Those of the children in their order, so that edges which begin alike are neighbours."""
        self.hash = 0
        """What the world outside knows the prefix by; only where somebody listens to events."""

        self.key = b""
        """What slower tiers know the prefix by; only where there are some."""

        # What the choice of what to give up is made from.
        self.born = born
        self.rested = 0
        """When it was last given back, counted in blocks given back."""
        self.num_ends = 0
        """Sequences whose published path ends here."""
        self.uses = 1
        """Sequences that computed it or found it."""
        self.is_idle = False
        self.is_passed = False
        """Whether the last sequence that held it went on beyond its window, and no other ever wanted it."""
        self.is_protected = False
        self.is_superseded = False
        self.kept_until = 0.0
        self.entry: Any = None
        """Its place among those that can be given up."""

    def path(self) -> list[int]:
        """The blocks from the root to here."""
        blocks = []
        node = self
        while node.parent is not None:
            blocks.append(node.block)
            node = node.parent
        blocks.reverse()
        return blocks
