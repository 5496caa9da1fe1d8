"""Nodes of the prefix cache's tree."""

from __future__ import annotations

from typing import Any

Edge = tuple[int | str | None, ...]
User = tuple[str, str]
"""An API key, and its name for a session; empty for requests without one."""


def as_digest(key: int) -> bytes:
    """The digest that a negative key of ``KeyedTokens`` is made of."""
    return (-1 - key).to_bytes(32)


def folded(token: int | str | None) -> int | str | None:
    """A token, or a number of 64 bits in place of the key of an image."""
    if isinstance(token, int) and token < 0:
        return -1 - int.from_bytes(as_digest(token)[:7])
    return token


class Node:
    """A cached block, identified by the path from the root, which has no block.

    ``block`` is negative in the root, and in a node whose block was evicted before its children (see ``RadixTree``).
    """

    __slots__ = (
        *("block", "children", "depth", "edge", "edges", "key", "parent"),
        *("born", "entry", "hash", "is_idle", "is_passed", "is_protected", "is_superseded", "keeper", "kept_until"),
        *("num_ends", "only_user", "rested", "place", "snapshot", "uses"),
    )

    def __init__(self, edge: Edge, block: int, parent: Node | None, born: int = 0) -> None:
        self.edge = edge
        self.block = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks on the path from the root, this one included."""
        self.children: dict[Edge, Node] = {}
        self.edges: list[Any] = []
        """The children's edges, sorted, so that edges with a common prefix are neighbours."""
        self.hash = 0
        """Hash of the prefix in KV events; 0 if events are disabled."""

        self.key = b""
        """Key of the prefix in slower tiers; empty if there are none."""

        self.snapshot: Any = None
        """The recurrent state behind it, if the cache has one: a ``Snapshot``."""

        self.place: Place | None = None

        # Inputs of the eviction policies.
        self.born = born
        self.rested = 0
        """Logical time, counted in blocks, at which it last became idle."""
        self.num_ends = 0
        """Sequences whose published path ends here."""
        self.uses = 1
        """Number of sequences that computed or matched it."""
        self.only_user: User | None = None
        """The session whose turns alone did; none once another request has."""
        self.is_idle = False
        self.is_passed = False
        """Whether only one sequence ever used it, and it is now behind that sequence's window."""
        self.is_protected = False
        self.is_superseded = False
        self.keeper: str | None = None
        """The API key that pins it, if any, until the time ``kept_until``."""
        self.kept_until = 0.0
        self.entry: Any = None
        """Its valid entry in the eviction heap, if any."""

    def note_place(self) -> Place:
        """A place that follows the end of the path to here."""
        if self.place is None:
            self.place = Place(self)
        return self.place

    def above(self, depth: int) -> Node:
        """The node of the first ``depth`` blocks of the path, or this one if it has no more."""
        node = self
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return node

    def nodes(self) -> list[Node]:
        """The path from the root, which is left out, to here."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path(self) -> list[int]:
        """The blocks from the root to here."""
        return [node.block for node in self.nodes()]


class Place:
    """The end of a path, as far as that is in the tree: what refers to it keeps no removed nodes.

    A node has at most one. Those of removed nodes are joined to that of the parent, as in a disjoint-set forest.
    """

    __slots__ = ("_at",)

    def __init__(self, node: Node) -> None:
        self._at: Node | Place = node

    @property
    def node(self) -> Node:
        while isinstance(self._at, Place) and isinstance(self._at._at, Place):
            self._at = self._at._at
        return self._at.node if isinstance(self._at, Place) else self._at

    def move(self, node: Node) -> None:
        """The node where it was is removed; ``node`` is its parent."""
        if node.place is None:
            node.place, self._at = self, node
        else:
            self._at = node.place
