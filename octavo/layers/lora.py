"""Linear maps to which LoRA adapters are applied for some rows of a step.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.linear.linear import Activation, LowRank, RowGroup, compose
from octavo.quant.stored.stored_weight import LinearWeight


class AdapterRows:
    """The adapter of each row of the current step; shared by all linear maps of a model."""

    max_rank: int | None = None
    """The largest supported rank; ``None``: any."""

    def __init__(self) -> None:
        self.by_number: Mapping[int, Tensor] = {}
        """Adapter number to the indices (int64) of the rows that use it."""

    def make_linear(self, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> AdaptedLinear:
        """A linear map that applies the adapters of these rows."""
        return AdaptedLinear(self, weights, bias_N)

    @contextlib.contextmanager
    def of_rows(self, adapters_T: Tensor) -> Iterator[None]:
        """Within this block, rows use the adapters with these numbers (int32); -1: no adapter."""
        numbers = [number for number in torch.unique(adapters_T).tolist() if number >= 0]
        self.by_number = {number: (adapters_T == number).nonzero()[:, 0] for number in numbers}
        try:
            yield
        finally:
            self.by_number = {}


class AdaptedLinear(Linear):
    """A linear map with the low-rank updates of each adapter.

    Rows without an adapter have bitwise the same results as with ``Linear``.
    """

    def __init__(self, rows: AdapterRows, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> None:
        super().__init__(weights, bias_N)
        self.changes: dict[int, list[LowRank]] = {}
        self._rows = rows

    def add(self, number: int, change: LowRank) -> None:
        """Add an adapter's update of some of the outputs."""
        self.changes.setdefault(number, []).append(change)

    def remove(self, number: int) -> None:
        """Remove an adapter's updates, if there are any."""
        self.changes.pop(number, None)

    def __call__(
        self,
        x_TK: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """See ``Linear``."""
        adapted = {number: rows for number, rows in self._rows.by_number.items() if number in self.changes}
        if not adapted:
            return super().__call__(x_TK, norm=norm, residual=residual, activation=activation)
        own = torch.cat(list(adapted.values()))
        own_residual = None if residual is None else residual[own]
        groups, end = [], 0
        for number, rows in adapted.items():
            groups.append(RowGroup(end, end := end + len(rows), self.changes[number]))
        changed = self._changed(x_TK[own], norm, own_residual, activation, groups)
        y_TN = changed.new_empty(len(x_TK), changed.shape[1])
        y_TN[own] = changed
        is_other = torch.ones(len(x_TK), dtype=torch.bool, device=x_TK.device)
        is_other[own] = False
        others = is_other.nonzero()[:, 0]
        if len(others):
            left = None if residual is None else residual[others]
            y_TN[others] = super().__call__(x_TK[others], norm=norm, residual=left, activation=activation)
        return y_TN

    def columns(self, x_TK: Tensor, norm: RMSNorm | None, sizes: Sequence[int]) -> list[Tensor]:
        """See ``Linear``; updates are those of all columns together."""
        return list(self(x_TK, norm=norm).split_with_sizes(list(sizes), dim=-1))

    def _changed(
        self,
        x_TK: Tensor,
        norm: RMSNorm | None,
        residual: Tensor | None,
        activation: Activation | None,
        groups: Sequence[RowGroup],
    ) -> Tensor:
        """Compute rows that all use an adapter: updates are added before the activation and the residual."""
        plain, fused = super().__call__, self.fused(norm, residual, activation)
        return compose(x_TK, fused, lambda normed_TK: ops.lora(plain(normed_TK), normed_TK, groups))
