"""Measuring kernels on a real device: every candidate is right, has a time, and the choice is used afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ROWS = (1, 16, 64, 128)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ops.triton import linear_configs

    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path))
    linear_configs.forget_tables()


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_shape_is_measured_and_its_choice_used(activation: str | None) -> None:
    from octavo.ops.triton import linear_configs
    from octavo.ops.triton.config_tables import fields_of
    from octavo.ops.triton.linear_configs import KINDS, config_for
    from octavo.ops.triton.linear_tuning import LinearTuner, candidates, measure
    from octavo.ops.triton.linear_uses import LinearUse

    device = torch.device("cuda", 0)
    use = LinearUse(1408, 704, has_norm=True, has_bias=activation is None, activation=activation)  # type: ignore[arg-type]
    weights = [torch.randn(use.N, use.K, device=device, dtype=use.dtype) * 0.05 for _ in range(3)]
    tuner = LinearTuner({use: weights}, device)
    for rows in ROWS:
        (key,) = tuner.prepare(rows, again=False)
        configs = candidates(use, rows, device)
        timed = measure(use, rows, configs, weights, device)
        assert {item.config for item in timed} == set(configs)
        assert all(0.5 < item.microseconds < 1000 for item in timed)
        entry = tuner.measure(key)
        linear_configs.use({key: entry}, device)
        found = config_for(rows, use.N, use.K, activation is not None, device)
        assert fields_of(found, KINDS) == entry
        assert tuner.prepare(rows, again=False) == []
    before = dict(linear_configs.table_of(device))
    linear_configs.forget_tables()
    assert linear_configs.table_of(device) == before
