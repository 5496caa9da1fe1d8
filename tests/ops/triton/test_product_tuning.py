"""Measuring kernels for linear maps: which are measured, that wrong ones are not chosen, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from octavo.ops.triton import linear_configs, linear_tuning
from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.launch import counters
from octavo.ops.triton.linear import linear_triton
from octavo.ops.triton.linear_configs import LinearConfig, key_of
from octavo.ops.triton.linear_tuning import LinearTuner, Timed, candidates, fastest, measure
from octavo.ops.triton.linear_uses import LinearUse, Uses, collecting
from octavo.ops.triton.skinny_gemm import MAX_TILES, SkinnyConfig

USES = (
    LinearUse(96, 64, has_norm=True),
    LinearUse(64, 96, has_residual=True, has_bias=True),
    LinearUse(192, 64, has_norm=True, activation="silu"),
)


@pytest.fixture(autouse=True)
def ten_microseconds(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 10 us; there is no table."""

    def microseconds(calls: Sequence[Callable[[], object]], with_pdl: bool) -> float:
        calls[0]()
        return 10.0

    monkeypatch.setattr(linear_tuning, "microseconds", microseconds)
    table: dict[str, LinearConfig] = {}
    for module in (linear_tuning, linear_configs):
        monkeypatch.setattr(module, "table_of", lambda device: table)
    counters(torch.device(device), MAX_TILES)


def weight_of(use: LinearUse, device: str) -> torch.Tensor:
    return torch.randn(use.N, use.K, device=device, dtype=use.dtype)


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("use", USES, ids=str)
def test_all_candidates_are_right(use: LinearUse, rows: int, device: str) -> None:
    where = torch.device(device)
    configs = candidates(use, rows, where)
    assert None in configs
    assert len(set(configs)) == len(configs) >= 3
    timed = measure(use, rows, configs, [weight_of(use, device)], where)
    assert [item.config for item in timed] == configs


def test_a_wrong_result_is_never_chosen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, right = USES[0], linear_tuning._result

    def result(given: linear_tuning.Operands, weight: torch.Tensor, config: LinearConfig) -> torch.Tensor:
        return right(given, weight, None) * (1.0 if config is None else float("nan"))

    monkeypatch.setattr(linear_tuning, "_result", result)
    timed = measure(use, 16, candidates(use, 16, torch.device(device)), [weight_of(use, device)], torch.device(device))
    assert timed == [Timed(10.0, None)]


def test_the_present_configuration_stays_unless_another_is_clearly_faster() -> None:
    present, other = GemvConfig(4, 64, 4), GemvConfig(2, 64, 4)
    assert fastest([Timed(10.0, present), Timed(9.95, other)], present) == present
    assert fastest([Timed(10.0, present), Timed(9.5, other)], present) == other
    assert fastest([Timed(9.5, other)], present) == other  # the present one was wrong
    assert fastest([], present) == present
    assert fastest([Timed(10.0, present), Timed(9.7, None)], present) == present  # cuBLAS must be 5 % faster
    assert fastest([Timed(10.0, present), Timed(9.0, None)], present) is None


def collected(device: str) -> Uses:
    """The uses of a pass of two layers."""
    x = torch.zeros(1, 64, device=device, dtype=torch.bfloat16)
    norm = torch.ones(64, device=device, dtype=torch.bfloat16)
    wide = torch.zeros(1, 96, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(64, device=device, dtype=torch.bfloat16)
    with collecting() as uses:
        for _ in range(2):
            assert linear_triton(x, weight_of(USES[0], device), None, norm, 1e-6).shape == (1, 96)
            linear_triton(wide, weight_of(USES[1], device), bias, None, 0.0, x)
            assert linear_triton(x, weight_of(USES[2], device), None, norm, 1e-6, None, "silu").shape == (1, 96)
    return uses


def test_the_maps_of_a_model_are_collected_with_their_weights(device: str) -> None:
    uses = collected(device)
    assert tuple(uses) == USES
    assert all(len(weights) == 2 and weights[0] is not weights[1] for weights in uses.values())


def test_what_is_in_the_table_is_measured_on_request_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device(device)
    tuner = LinearTuner(collected(device), where)
    monkeypatch.setattr(linear_tuning, "compiling", lambda num_threads: linear_tuning.pdl())
    monkeypatch.setattr(linear_tuning.Operands, "run", lambda self, weight, config: None)
    keys = [key_of(use.product(16)) for use in USES]
    assert tuner.prepare(16, again=False) == keys
    linear_configs.table_of(where)[keys[0]] = None
    assert tuner.prepare(16, again=False) == keys[1:]
    assert tuner.prepare(16, again=True) == keys


def test_an_entry_names_the_fastest(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = SkinnyConfig(64, 64, 4, 3)
    monkeypatch.setattr(linear_tuning, "measure", lambda *args: [Timed(10.0, None), Timed(5.0, fast)])
    tuner = LinearTuner(collected(device), torch.device(device))
    tuner._prepared["key"] = USES[0], 16
    entry = tuner.measure("key")
    assert entry == {"kernel": "skinny", **{name: getattr(fast, name) for name in entry if name != "kernel"}}


def test_float32_is_left_to_the_library(device: str) -> None:
    tuner = LinearTuner({LinearUse(96, 64, torch.float32): []}, torch.device(device))
    assert tuner.prepare(16, again=True) == []


def test_a_candidate_that_fails_does_not_stop_the_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use, run = USES[0], linear_tuning.run_linear

    def failing(*args: Any) -> torch.Tensor:
        if isinstance(args[-1], SkinnyConfig):
            raise OutOfResources(300_000, 227_000, "shared memory")
        return run(*args)

    monkeypatch.setattr(linear_tuning, "run_linear", failing)
    tuner = LinearTuner({use: [weight_of(use, device)]}, torch.device(device))
    (key,) = tuner.prepare(16, again=True)
    timed = measure(use, 16, candidates(use, 16, torch.device(device)), [weight_of(use, device)], torch.device(device))
    assert timed == [Timed(10.0, None)]
    assert tuner.measure(key) == {"kernel": "cublas"}
