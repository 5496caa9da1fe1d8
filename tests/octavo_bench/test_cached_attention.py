"""Measurements of attention by the type of the cache, with another clock, on the device that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from octavo.errors import ConfigError
from tests.triton_interpreter import DEVICE, HAS_TRITON

if not HAS_TRITON:
    pytest.skip("needs Triton", allow_module_level=True)

from octavo_bench import cached_attention


def test_figures_are_those_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Sequence[Callable[[], torch.Tensor]], with_pdl: bool) -> float:
        results = [call() for call in calls]
        assert all(result.shape == (3, 8 * 32) and result.isfinite().all() for result in results)
        return 2.0

    monkeypatch.setattr(cached_attention, "DEVICE", torch.device(DEVICE))
    monkeypatch.setattr(cached_attention, "ALONE_BYTES", 1)
    monkeypatch.setattr(cached_attention, "microseconds", timed)
    monkeypatch.setattr(cached_attention.ceilings, "measure", lambda: {"read_tb_s": 0.5})
    rows = cached_attention.measure(["bfloat16", "fp8", "int8", "int4"], [100], [3], [8, 2, 32], sweep=False)["rows"]
    assert [row["floor_microseconds"] for row in rows] == [
        round(2 * 3 * 2 * 100 * size / 0.5e6, 1) for size in (64, 32, 36, 20)
    ]
    assert [row["times_floor"] for row in rows] == [
        pytest.approx(2.0 * 0.5e6 / (1200 * size), abs=1e-3) for size in (64, 32, 36, 20)
    ]


@pytest.mark.parametrize(
    ("kinds", "heads", "message"),
    [(["int2"], [8, 2, 32], "kinds: 'int2' is not one of"), (["int8"], [8, 2], "heads: .* are not three numbers")],
)
def test_what_cannot_be_measured(kinds: list[str], heads: list[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cached_attention.measure(kinds, [100], [1], heads, sweep=False)
