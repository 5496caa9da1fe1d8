"""Measuring kernels on a real device: every candidate is right, has a time, and the choice is used afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.ops.linear.grouped_linear import Number
from octavo.ops.linear.linear import Activation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_kernels.triton import config_tables

    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    config_tables.forget_tables()


@pytest.mark.parametrize("number", [None, "int4", "int8", "e4m3"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_shape_is_measured_and_its_choice_used(activation: Activation | None, number: Number | None) -> None:
    from octavo_kernels.triton import config_tables
    from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
    from octavo_kernels.triton.tuning.linear_uses import LinearUse
    from octavo_kernels.triton.tuning.product_tuning import GroupedUse, ProductTuner, measure, use_entries
    from octavo_kernels.triton.tuning.tuning_target import ProductUse
    from tests.ops.triton.test_grouped_linear import random_groups

    device = torch.device("cuda", 0)
    use: ProductUse = LinearUse(1408, 640, has_norm=True, has_bias=activation is None, activation=activation)
    weights: list[Any] = [torch.randn(use.N, use.K, device=device, dtype=use.dtype) * 0.05 for _ in range(3)]
    if number is not None:
        group = 0 if number == "e4m3" else 128
        weights = [random_groups("cuda", number, use.N, use.K, group) for _ in range(3)]
        use = GroupedUse(**vars(use), number=number, groups=len(weights[0].scales_GN))
    tuner = ProductTuner({use: weights}, device)
    for rows in use.row_buckets:
        (name,) = tuner.prepare(rows, again=False)
        configs = use.candidates(rows, device, use.num_candidates)
        timed = measure(use, rows, configs, weights, device)
        assert {item.config for item in timed} == set(configs)
        assert all(0.5 < item.microseconds < 1000 for item in timed)
        entry = tuner.measure(name)
        assert entry is not None
        use_entries({name: entry}, device)
        assert use.table.fields_of(use.present(rows, device)) == entry
        assert tuner.prepare(rows, again=False) == []
        if number is not None:
            assert any(isinstance(config, GroupedGemvConfig) for config in configs) == (rows <= 16)
    before = dict(use.table.of(device))
    config_tables.forget_tables()
    assert use.table.of(device) == before
