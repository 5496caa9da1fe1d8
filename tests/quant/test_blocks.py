"""Weights that stay in blocks: which device takes them, and what applying one gives."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import dispatch
from octavo.ops.block_linear import KINDS, block_linear
from octavo.quant.blocks import PackedBlockScheme
from octavo.weights.blocks import dequantize
from tests.ops.cpu_cases import needs_float_kernels, random_blocks


@needs_float_kernels
def test_this_machine_takes_blocks() -> None:
    assert PackedBlockScheme().declines("cpu") is None
    assert PackedBlockScheme().kinds == KINDS


def test_without_a_kernel_blocks_are_declined_with_the_reason() -> None:
    assert PackedBlockScheme().declines("cuda") == "block_linear has no kernel for cuda"
    with dispatch.only("reference"):
        assert PackedBlockScheme().declines("cpu") == "numba: only reference is allowed now"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_applying_a_weight_is_its_matrix_product(kind: str) -> None:
    blocks, x = random_blocks(kind, 24, 256), torch.randn(3, 256)
    weight = PackedBlockScheme().pack(blocks)
    exact = x.double() @ torch.from_numpy(dequantize(blocks)).double().T
    found = weight.apply(x)
    assert (found.double() - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(found, block_linear(x, weight.packed))
    assert weight.num_bytes == weight.packed.num_bytes > 0
