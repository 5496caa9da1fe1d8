"""The model of cost: how good its choices are for shapes that it was not fitted to."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

pytest.importorskip("triton")

from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig
from octavo_kernels.triton.tuning.linear_cost import FITTED, Gpu, Product, microseconds, ranked
from tests.ops.triton.cost_fit import H200, MeasuredConfig, left_out, read, regrets

FOLDER = Path(__file__).parents[3] / "benchmarks/results/gpu"
RECORDS = FOLDER / "kernels_linear.json", FOLDER / "kernels_served.json"
H100 = Gpu(multiprocessors=132, bandwidth=3_350_000, shared_bytes=227 * 1024, has_copy_engine=True)
RTX_4090 = Gpu(multiprocessors=128, bandwidth=1_008_000, shared_bytes=99 * 1024, has_copy_engine=False)


@pytest.fixture(scope="module")
def measured() -> list[MeasuredConfig]:
    found = read(RECORDS)
    assert len(found) == 1722
    assert len({(item.product.N, item.product.K) for item in found}) == 85
    return found


def test_choices_are_nearly_the_fastest_that_were_measured(measured: list[MeasuredConfig]) -> None:
    found = regrets(measured, FITTED)
    assert len(found) == 173
    assert statistics.mean(found.values()) < 0.015
    assert statistics.quantiles(found.values(), n=20)[-1] < 0.06
    assert max(found.values()) < 0.15


@pytest.mark.nightly
def test_so_are_those_for_matrices_left_out_of_the_fit(measured: list[MeasuredConfig]) -> None:
    """A short fit; the one that is documented has twenty times the trials."""
    found = left_out(measured, trials=30)
    assert statistics.mean(found.values()) < 0.03
    assert statistics.quantiles(found.values(), n=20)[-1] < 0.10


def test_a_choice_at_random_would_be_worse(measured: list[MeasuredConfig]) -> None:
    fastest: dict[Product, float] = {}
    for item in measured:
        fastest[item.product] = min(item.taken, fastest.get(item.product, item.taken))
    assert statistics.mean(item.taken / fastest[item.product] - 1 for item in measured) > 0.1


@pytest.mark.parametrize("gpu", [H200, H100, RTX_4090], ids=["h200", "h100", "4090"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("N", "K"), [(28_672, 4096), (4096, 14_336), (262_208, 1152), (896, 896), (96, 64)])
def test_every_shape_has_configurations_that_fit_the_gpu(gpu: Gpu, rows: int, is_gated: bool, N: int, K: int) -> None:
    product = Product(N, K, rows, is_gated)
    found = [config for config in ranked(product, gpu) if isinstance(config, SkinnyConfig)]
    assert len(set(found)) == len(found) > 0
    times = [microseconds(product, config, gpu) for config in found]
    assert times == sorted(times)
    for config in found:
        block_t, weights = config.block_t or rows, 2 if is_gated else 1
        chunk = (weights * config.block_n + block_t) * config.block_k * 2
        assert config.stages * chunk < gpu.shared_bytes
        assert config.stages >= 2
        assert config.splits * config.block_k <= K or config.splits == 1
        assert config.copy_engine == gpu.has_copy_engine


def test_time_is_at_least_that_of_the_bytes() -> None:
    for gpu in (H200, H100, RTX_4090):
        product = Product(28_672, 4096, 16, True)
        best = ranked(product, gpu)[0]
        assert isinstance(best, SkinnyConfig)
        floor = 2 * 28_672 * 4096 / gpu.bandwidth
        assert floor < microseconds(product, best, gpu) < 1.6 * floor
