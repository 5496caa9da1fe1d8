"""Linear maps that adapters change for some rows of a step.

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
from octavo.ops.linear import Activation, compose
from octavo.ops.lora import LowRank, RowGroup
from octavo.quant.stored import LinearWeight


class AdapterRows:
    """Which rows of the step that is being computed want which adapter; one for all maps of a model."""

    max_rank: int | None = None
    """The highest rank that there is room for; ``None``: any."""

    def __init__(self) -> None:
        self.by_name: Mapping[str, Tensor] = {}
        """Row numbers, int64."""
        self.places: dict[str, int] = {}
        """The adapters that are loaded, and a number for each that no other has."""

    def make_linear(self, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> AdaptedLinear:
        """A map whose rows these are."""
        return AdaptedLinear(self, weights, bias_N)

    @contextlib.contextmanager
    def of_step(self, by_name: Mapping[str, Tensor]) -> Iterator[None]:
        """Within this block, these are the rows."""
        self.by_name = by_name
        try:
            yield
        finally:
            self.by_name = {}


class AdaptedLinear(Linear):
    """A linear map with the changes that each adapter makes to it.

    Rows without a change are computed as by ``Linear``, to the bit.
    """

    def __init__(self, rows: AdapterRows, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> None:
        super().__init__(weights, bias_N)
        self.changes: dict[str, list[LowRank]] = {}
        self._rows = rows

    def add(self, name: str, change: LowRank) -> None:
        """Let an adapter change some of the outputs."""
        self.changes.setdefault(name, []).append(change)

    def remove(self, name: str) -> None:
        """Forget what an adapter changes, if anything."""
        self.changes.pop(name, None)

    def __call__(
        self,
        x_TK: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """See ``Linear``."""
        wanted = {name: rows for name, rows in self._rows.by_name.items() if name in self.changes}
        if not wanted:
            return super().__call__(x_TK, norm=norm, residual=residual, activation=activation)
        own = torch.cat(list(wanted.values()))
        own_residual = None if residual is None else residual[own]
        groups, end = [], 0
        for name, rows in wanted.items():
            groups.append(RowGroup(end, end := end + len(rows), self.changes[name]))
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

    def _changed(
        self,
        x_TK: Tensor,
        norm: RMSNorm | None,
        residual: Tensor | None,
        activation: Activation | None,
        groups: Sequence[RowGroup],
    ) -> Tensor:
        """All of these rows are changed: before the activation, and before the residual is added."""
        norm_K, eps = (None, 0.0) if norm is None else (norm.weight_D, norm.eps)
        plain = super().__call__
        return compose(
            x_TK, norm_K, eps, residual, activation, lambda normed_TK: ops.lora(plain(normed_TK), normed_TK, groups)
        )
