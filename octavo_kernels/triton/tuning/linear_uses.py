"""Products with weights of 16 bits, for the measuring of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.linear.linear import run_linear
from octavo_kernels.triton.linear.linear_configs import ROW_BUCKETS, TABLE, LinearConfig, config_for, key_of
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig
from octavo_kernels.triton.tuning.linear_cost import Product, gpu_of, ranked
from octavo_kernels.triton.tuning.product_calls import ProductCall
from octavo_kernels.triton.tuning.tuning_target import EPS, Operands, ProductUse

SPLITS_OF_A_TILE = 2
"""Candidates that differ in their splits alone."""


@dataclass(frozen=True)
class LinearUse(ProductUse):
    """How ``linear`` is called."""

    table = TABLE
    row_buckets = ROW_BUCKETS
    num_candidates = 6

    @classmethod
    def of(cls, call: ProductCall, weight_NK: Tensor) -> LinearUse:
        """How this call uses this weight."""
        N, K = weight_NK.shape
        return cls(N, K, *call[1:])

    def product(self, rows: int) -> Product:
        """The product for up to ``rows`` rows."""
        return Product(self.N, self.K, rows, self.is_gated)

    def key(self, rows: int) -> str:
        return key_of(self.product(rows))

    def present(self, rows: int, device: torch.device) -> LinearConfig:
        return config_for(rows, self.N, self.K, self.is_gated, device)

    def candidates(self, rows: int, device: torch.device, count: int) -> list[LinearConfig]:
        """The present configuration, the library's, and those of the least predicted cost, of different tiles."""
        found: dict[LinearConfig, None] = {self.present(rows, device): None, None: None}
        tiles: dict[object, int] = {}
        for config in ranked(self.product(rows), gpu_of(device)):
            tile: object = config
            if isinstance(config, SkinnyConfig):
                tile = config.block_n, config.block_k, config.warps, config.stages, config.block_t
            tiles[tile] = tiles.get(tile, 0) + 1
            if tiles[tile] <= SPLITS_OF_A_TILE and len(found) < count + 2:
                found[config] = None
        return list(found)

    @property
    def reference(self) -> LinearConfig:
        return None

    def run(self, given: Operands, weight: Tensor, config: LinearConfig) -> Tensor:
        x_TK, bias_N, norm_K, residual_TN = given
        return run_linear(x_TK, weight, Fused(bias_N, norm_K, EPS, residual_TN, self.activation), config)
