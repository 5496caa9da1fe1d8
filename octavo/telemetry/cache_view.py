"""What is shown of an engine's KV cache: who owns which block, the prefix tree, and the sessions.

There is no token in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

FREE, CACHED, SHARED = -2, -1, 0
"""Owners of blocks that are free, kept by the prefix cache, or held by several sequences; request ids are positive."""


class PrefixView(msgspec.Struct, frozen=True, gc=False):
    """A chain of cached blocks in the prefix tree, up to where it branches or ends."""

    parent: int
    """Index of the chain above it; -1 for the root."""
    blocks: int
    held: int
    """Of those, blocks that sequences hold."""


class SessionView(msgspec.Struct, frozen=True, gc=False):
    """A conversation, and what the prefix cache has of it."""

    id: str
    owner: str
    """Name of its API key."""
    requests: int
    tokens: int
    """Of its last turn, prompt and answer, in full blocks; of the longest, where helpers have the same name."""
    cached_tokens: int
    """Of those, tokens that have been cached since."""
    pinned_tokens: int
    """Of those, tokens that are evicted only after what nobody pins."""
    found_tokens: int
    """Prompt tokens of all its requests that were found."""
    idle_seconds: float
    """Since its latest turn ended."""
    pinned_seconds: float
    """For which it stays pinned."""


class SessionOrder(msgspec.Struct, frozen=True, gc=False):
    """What is asked of an engine about sessions: which it has, to free what is cached for the one called ``name`` and
    for no other, or to bring what of it is on disk to host memory."""

    action: Literal["list", "forget", "prefetch"]
    owner: str | None
    """Name of an API key; ``None`` to list those of all."""
    name: str = ""


class SessionReport(msgspec.Struct, frozen=True):
    """The answer of an engine."""

    sessions: list[SessionView] = []
    """To "list": those used last."""
    is_taken: bool = False
    """To "prefetch": whether it was taken."""

    @staticmethod
    def joined(reports: Sequence[SessionReport]) -> SessionReport:
        """The answer of several engines."""
        sessions = [session for report in reports for session in report.sessions]
        return SessionReport(sessions, any(report.is_taken for report in reports))


class CacheView(msgspec.Struct, frozen=True, gc=False):
    """The first KV group between two steps; its size is bounded."""

    blocks_per_cell: int
    owners: list[int]
    """Owners of the cells of ``blocks_per_cell`` blocks each, run-length encoded: owner, number of cells, and so on.
    A cell has the owner of the youngest request in it."""
    prefixes: list[PrefixView]
    """The first chains of the prefix tree, parents before children."""
    has_more: bool
    """Whether the prefix tree has further chains."""
    seconds: float
    """Seconds that this view took to make."""
    sessions: list[SessionView] = []
    """Those used last."""
