"""Which configurations of products with packed weights are measured: such as can run, and different ones."""

from __future__ import annotations

import pytest

from octavo.ops.linear.grouped_linear import Number
from octavo_kernels.triton.grouped.grouped_configs import ROW_BUCKETS
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.tuning.grouped_cost import ranked
from octavo_kernels.triton.tuning.linear_cost import Gpu

H200 = Gpu(132, 4.8e6, 227 * 1024, has_copy_engine=True)
SMALL = Gpu(36, 0.3e6, 99 * 1024, has_copy_engine=False)
SHAPES = [(6144, 4096, False), (24576, 4096, True), (4096, 12288, False), (151936, 4096, False), (256, 33, False)]


@pytest.mark.parametrize("gpu", [H200, SMALL], ids=["H200", "small"])
@pytest.mark.parametrize(("N", "K", "is_gated"), SHAPES)
@pytest.mark.parametrize(("number", "groups_of"), [("int4", 128), ("int8", 0), ("e4m3", 0), ("e2m1", 16)])
def test_there_are_different_candidates_for_any_product(
    number: Number, groups_of: int, N: int, K: int, is_gated: bool, gpu: Gpu
) -> None:
    groups = K // groups_of if groups_of and K % groups_of == 0 else 1
    for rows in ROW_BUCKETS:
        found = ranked(GroupedProduct(number, groups, N, K, is_gated), rows, gpu)
        assert len(found) == len(set(found)) >= 2
        first = found[:8]
        gemvs = [config for config in first if isinstance(config, GroupedGemvConfig)]
        gemms = [config for config in first if isinstance(config, GroupedGemmConfig)]
        assert gemms
        assert bool(gemvs) == (rows <= 16)
        assert all(config.split % config.warps == 0 for config in gemvs)
        assert all(not config.prefetch or config.release == "early" for config in gemvs)
        if gemvs:
            assert len({(config.block_n, config.split) for config in gemvs}) >= 2
        for config in gemms:
            assert config.block_t == min(max(16, rows), 64 if is_gated else 128)
            assert config.block_n * config.block_t * (2 if is_gated else 1) <= 128 * 32 * config.warps


def test_splits_are_for_products_of_few_tiles() -> None:
    few, many = (
        {config.splits for config in ranked(GroupedProduct("int4", 32, N, 4096, False), 64, H200)}
        for N in (4096, 151936)
    )
    assert max(few) > 1
    assert many == {1}
