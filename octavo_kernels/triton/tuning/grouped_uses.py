"""Products with packed weights, for the measuring of kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.grouped_linear import LARGEST_COPY, Number, PackedGroups
from octavo.ops.linear import Fused
from octavo_kernels.hopper.pipelined_configs import pipelined_configs
from octavo_kernels.hopper.streamed_configs import streamed_configs
from octavo_kernels.triton.grouped.grouped_configs import ROW_BUCKETS, TABLE, GroupedConfig, config_for, key_of
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_linear import run_grouped
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.tuning.grouped_cost import ranked
from octavo_kernels.triton.tuning.linear_cost import gpu_of
from octavo_kernels.triton.tuning.product_calls import ProductCall
from octavo_kernels.triton.tuning.tuning_target import EPS, Operands, ProductUse

DENSE_ROWS = 128
"""From so many rows on, a dense copy of the weight may be worth its bytes."""


@dataclass(frozen=True, kw_only=True)
class GroupedUse(ProductUse):
    """How ``grouped_linear`` is called."""

    table = TABLE
    row_buckets = ROW_BUCKETS
    num_candidates = 7

    number: Number
    groups: int
    has_zeros: bool = False
    has_minima: bool = False
    has_order: bool = False
    scale_bytes: int = 2

    @classmethod
    def of(cls, call: ProductCall, packed: PackedGroups) -> GroupedUse:
        """How this call uses this weight."""
        N, K = packed.shape
        return cls(
            N,
            K,
            *call[1:],
            number=packed.number,
            groups=len(packed.scales_GN),
            has_zeros=packed.zeros_GN is not None,
            has_minima=packed.minima_GN is not None,
            has_order=packed.order_K is not None,
            scale_bytes=packed.scales_GN.element_size(),
        )

    @property
    def product(self) -> GroupedProduct:
        """The product for any number of rows."""
        sizes = self.number, self.groups, self.N, self.K, self.is_gated
        return GroupedProduct(*sizes, self.dtype, self.has_zeros, self.has_minima, self.scale_bytes)

    @property
    def may_be_dense(self) -> bool:
        """Whether there may be a dense copy of the weight."""
        return self.N * self.K <= LARGEST_COPY

    def key(self, rows: int) -> str:
        return key_of(self.product, rows)

    def present(self, rows: int, device: torch.device) -> GroupedConfig:
        return config_for(rows, self.product, device)

    def candidates(self, rows: int, device: torch.device, count: int) -> list[GroupedConfig]:
        """The present configuration, for many rows a dense copy, what overlaps copies and products, and those of the
        least predicted cost."""
        found: dict[GroupedConfig, None] = {self.present(rows, device): None}
        if rows >= DENSE_ROWS and self.may_be_dense:
            found[None] = None
        most = len(found) + count
        overlapping = streamed_configs(self.product, device) if rows == 1 else []
        found |= dict.fromkeys(overlapping or pipelined_configs(self.product, rows, device))
        for config in ranked(self.product, rows, gpu_of(device)):
            if len(found) < most:
                found[config] = None
        return list(found)

    @property
    def reference(self) -> GroupedConfig:
        """A dense copy; where that is too large, the plainest tiles."""
        return None if self.may_be_dense else GroupedGemmConfig(64, 16, warps=4, stages=2, release="late")

    def run(self, given: Operands, weight: PackedGroups, config: GroupedConfig) -> Tensor:
        x_TK, bias_N, norm_K, residual_TN = given
        return run_grouped(x_TK, weight, Fused(bias_N, norm_K, EPS, residual_TN, self.activation), config)
