"""What the measuring of kernels has to know of a kind of product: a map with 16-bit weights, or with packed ones."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from octavo.ops.linear.linear import Activation
from octavo_kernels.triton.config_tables import ConfigTable

EPS = 1e-6


class Operands(NamedTuple):
    """Inputs of a product other than its weight."""

    x_TK: Tensor
    bias_N: Tensor | None
    norm_K: Tensor | None
    residual_TN: Tensor | None

    def copied(self) -> Operands:
        """The same with a copy of the residual, which a run overwrites."""
        return self if self.residual_TN is None else self._replace(residual_TN=self.residual_TN.clone())


@dataclass(frozen=True)
class ProductUse(ABC):
    """How a product [T, K] times [N, K] is called, but for its rows. Configurations are those of its table."""

    table: ClassVar[ConfigTable]
    row_buckets: ClassVar[tuple[int, ...]]
    """The numbers of rows up to which a table has entries."""
    num_candidates: ClassVar[int]
    """``count`` of a start of the engine."""

    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    has_norm: bool = False
    has_residual: bool = False
    has_bias: bool = False
    activation: Activation | None = None

    @property
    def is_gated(self) -> bool:
        """Whether half of the N outputs are gates."""
        return self.activation is not None

    @abstractmethod
    def key(self, rows: int) -> str:
        """The name of its entry in the table."""

    @abstractmethod
    def present(self, rows: int, device: torch.device) -> Any:
        """The configuration that is used without a measurement."""

    @abstractmethod
    def candidates(self, rows: int, device: torch.device, count: int) -> list[Any]:
        """The present configuration, cuBLAS where it may be faster, and ``count`` others."""

    @property
    @abstractmethod
    def reference(self) -> Any:
        """A configuration that is right, to check others against."""

    @abstractmethod
    def run(self, given: Operands, weight: Any, config: Any) -> Tensor:
        """The product in this configuration."""

    def operands(self, rows: int, device: torch.device) -> Operands:
        """Random operands for this many rows."""
        random = functools.partial(torch.randn, device=device, dtype=self.dtype)
        outputs = self.N // 2 if self.is_gated else self.N
        return Operands(
            random(rows, self.K),
            random(self.N) if self.has_bias else None,
            random(self.K).abs() + 0.5 if self.has_norm else None,
            random(rows, outputs) if self.has_residual else None,
        )
