"""Model FLOPs utilisation."""

from __future__ import annotations

import pytest

from octavo_bench.offline import Utilisation, data_sheet_peak
from octavo_fleet.sim.costs.roofline import shape_of
from octavo_fleet.sim.shapes import SHAPES


@pytest.mark.parametrize(
    ("gpu", "tflop_s"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA L40", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_of_a_gpu_by_the_name_that_its_driver_has(gpu: str, tflop_s: float | None) -> None:
    assert data_sheet_peak(gpu) == (tflop_s and pytest.approx(tflop_s))


def test_short_contexts_take_two_operations_for_each_weight() -> None:
    shape = shape_of(SHAPES["llama-3.1-8b"])
    assert shape.active_weights == pytest.approx(7.5e9, rel=0.01)
    used = Utilisation(shape, 989.0)
    assert used.decode(1000.0, 1)["decode_gflop_s"] == pytest.approx(2 * 7.5e9 * 1000 / 1e9, rel=0.01)
    assert used.decode(1000.0, 1)["decode_mfu_percent"] == pytest.approx(100 * 15e12 / 989e12, rel=0.01)
    # Queries, keys, values and sums: 4 operations for each of 32 layers, 4096 channels and 8192 tokens.
    attention = used.decode(1.0, 8192)["decode_gflop_s"] - used.decode(1.0, 0)["decode_gflop_s"]
    assert attention == pytest.approx(4 * 32 * 4096 * 8192 / 1e9)


def test_requests_are_their_prompts_and_their_tokens() -> None:
    used = Utilisation(shape_of(SHAPES["qwen3-0.6b"]), None)
    whole = used.requests(2.0, 100, 51)
    prefill, decode = used.prefill(200.0, 100), used.decode(100.0, 125)
    assert whole == {"gflop_s": pytest.approx(prefill["prefill_gflop_s"] + decode["decode_gflop_s"])}


def test_a_model_whose_arithmetic_is_not_known_has_no_figures() -> None:
    used = Utilisation(None, 989.0)
    assert (used.prefill(1.0, 1), used.decode(1.0, 1), used.requests(1.0, 1, 1)) == ({}, {}, {})
