"""The last layer, behind its attention, for the rows that are wanted alone: there no row needs another's result.

Of a prompt of many tokens one row is wanted, the last. Every other layer gives all rows, which the next one attends to.

Shapes: T tokens of the step, R rows that are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def in_last(layers: Sequence[object], wanted_R: Tensor | None) -> list[Tensor | None]:
    """For each layer the rows that are wanted of it, ``None`` for all."""
    return [*[None] * (len(layers) - 1), wanted_R]


def pick(wanted_R: Tensor | None, *rows_TX: Tensor) -> Sequence[Tensor]:
    """The wanted rows of each of these as new tensors, or all, as they are."""
    return rows_TX if wanted_R is None else [rows[wanted_R] for rows in rows_TX]
