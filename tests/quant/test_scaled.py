"""FP8 weights on a CPU: packed as 8-bit numbers with exactly the checkpoint's values, or dequantised."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.quant.stored.scaled import ScaledStored, ScaledWeight
from octavo.quant.stored.stored_weight import WeightFormat, filled
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant.test_stored import scaled

pytestmark = needs_float_kernels
PACKS = WeightFormat(torch.float32, torch.device("cpu"), packs=True)
BLOCKS = {"tensor": (0, 0), "output": (1, 0), "blocks": (8, 128), "last blocks shorter": (5, 160)}


@pytest.mark.parametrize("name", BLOCKS)
def test_packed_weights_keep_their_values(name: str) -> None:
    stored = scaled(*BLOCKS[name])(37, 1024, 1)
    assert isinstance(stored, ScaledStored)
    weight = stored.pack(PACKS)
    assert isinstance(weight, ScaledWeight)
    exact, rows = filled([stored], PACKS), torch.tensor([36, 0, 17])
    assert torch.equal(weight.rows(torch.arange(37)), exact)
    assert torch.equal(weight.rows(rows), exact[rows])
    assert 37 * 1024 < weight.num_bytes < 1.05 * 37 * 1024
    x = torch.randn(3, 1024)
    torch.testing.assert_close(weight.apply(x), x @ exact.T, rtol=1e-5, atol=1e-4)


def test_what_no_kernel_takes_is_dequantised() -> None:
    stored = scaled(1, 0)(16, 64, 1)
    assert isinstance(stored, ScaledStored)
    assert stored.pack(replace(PACKS, packs=False)) is None
    assert stored.pack(replace(PACKS, dtype=torch.bfloat16)) is None
    assert ScaledStored(stored.values_NK, torch.ones(16, 8), (1, 8)).pack(PACKS) is None
    values_NK = stored.values_NK.clone()
    values_NK[3, 5] = torch.nan
    assert ScaledStored(values_NK, stored.scales, stored.block).pack(PACKS) is None
