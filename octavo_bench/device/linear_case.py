"""A linear map as a model calls it, with operands to measure its kernels on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.linear.linear import Activation
from octavo_bench.device.measured_case import DTYPE, EPS
from octavo_kernels.triton.tuning.linear_uses import LinearUse

ROWS_CHECKED = 16


class CaseOperands(NamedTuple):
    """What a linear map is given beside its weight."""

    x_TK: Tensor
    norm_K: Tensor | None
    residual_TN: Tensor | None


@dataclass(frozen=True)
class LinearCase:
    """A linear map as a model calls it."""

    model: str
    name: str
    N: int
    K: int
    has_norm: bool = False
    has_residual: bool = False
    activation: Activation | None = None

    @property
    def outputs(self) -> int:
        return self.N if self.activation is None else self.N // 2

    @property
    def use(self) -> LinearUse:
        """The map as the engine's tuning knows it."""
        return LinearUse(self.N, self.K, DTYPE, self.has_norm, self.has_residual, False, self.activation)

    def row_bytes(self, T: int) -> int:
        """Bytes that T rows cannot do without, the weight aside."""
        return DTYPE.itemsize * T * (self.K + self.outputs * (2 if self.has_residual else 1))

    def operands(self, T: int, device: torch.device) -> CaseOperands:
        """Fresh random ones."""
        return CaseOperands(
            torch.randn(T, self.K, device=device, dtype=DTYPE),
            torch.rand(self.K, device=device, dtype=DTYPE) + 0.5 if self.has_norm else None,
            torch.randn(T, self.outputs, device=device, dtype=DTYPE) if self.has_residual else None,
        )

    def error(self, T: int, weight_NK: Tensor, run: Callable[[CaseOperands], Tensor]) -> float:
        """Norm of the difference of what ``run`` gives from float64 over the norm of the result, for a few rows."""
        given = self.operands(T, weight_NK.device)
        picked = torch.randperm(T, device=weight_NK.device)[:ROWS_CHECKED]
        expected = self._expected(given, picked, weight_NK)
        # What the allocator gives out next: a result that is not written shows.
        torch.full((T, self.outputs), float("nan"), device=weight_NK.device, dtype=DTYPE)
        difference = run(given)[picked].double() - expected
        return float(difference.norm() / expected.norm())

    def _expected(self, given: CaseOperands, picked: Tensor, weight_NK: Tensor) -> Tensor:
        x = given.x_TK[picked].double()
        if given.norm_K is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * given.norm_K.double()
        y = torch.cat([x @ part.double().T for part in torch.split(weight_NK, 8192)], dim=-1)
        if self.activation is not None:
            gate, up = y.chunk(2, dim=-1)
            y = functional.silu(gate) * up
        return y if given.residual_TN is None else y + given.residual_TN[picked].double()
