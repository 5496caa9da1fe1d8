"""Measuring kernels for matrix products: which are measured, that wrong ones are not chosen, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.config_tables import ConfigTable
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_linear import grouped_linear_triton
from octavo_kernels.triton.launch import counters, is_compiling
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.linear import linear_triton
from octavo_kernels.triton.linear.skinny_gemm import MAX_TILES, SkinnyConfig
from octavo_kernels.triton.tuning import linear_uses, product_tuning
from octavo_kernels.triton.tuning.linear_uses import LinearUse
from octavo_kernels.triton.tuning.product_calls import ProductCall, collecting
from octavo_kernels.triton.tuning.product_tuning import (
    GroupedUse,
    ProductTuner,
    Timed,
    Weight,
    fastest,
    measure,
    name_of,
    use_entries,
    uses_of,
)
from octavo_kernels.triton.tuning.tuning_target import Operands, ProductUse
from tests.ops.triton.test_grouped_linear import random_groups
from tests.tiers import one_in
from tests.triton_interpreter import quick_first

LINEAR = (
    LinearUse(96, 64, has_norm=True),
    LinearUse(64, 96, has_residual=True, has_bias=True),
    LinearUse(192, 64, has_norm=True, activation="silu"),
)
GROUPED = (
    GroupedUse(96, 64, has_norm=True, number="int4", groups=2),
    GroupedUse(64, 96, has_residual=True, has_bias=True, number="e4m3", groups=1),
    GroupedUse(192, 64, has_norm=True, activation="silu", number="int4", groups=2, has_zeros=True, has_order=True),
)
USES: tuple[ProductUse, ...] = (*LINEAR, *GROUPED)


@pytest.fixture(autouse=True)
def tables(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Every call takes 10 us; tables are empty."""

    def microseconds(calls: Sequence[Callable[[], object]], with_pdl: bool) -> float:
        calls[0]()
        return 10.0

    monkeypatch.setattr(product_tuning, "microseconds", microseconds)
    found: dict[str, dict[str, Any]] = {"linear": {}, "grouped_linear": {}}
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: found[self.section])
    counters(torch.device(device), MAX_TILES)
    torch.manual_seed(0)
    return found


def weight_of(use: ProductUse, device: str) -> Weight:
    if isinstance(use, GroupedUse):
        group = use.K // use.groups if use.groups > 1 else 0
        return random_groups(device, use.number, use.N, use.K, group, use.has_zeros, use.has_order)
    return torch.randn(use.N, use.K, device=device, dtype=use.dtype)


def candidates(use: ProductUse, rows: int, device: str) -> list[Any]:
    return use.candidates(rows, torch.device(device), use.num_candidates)


@one_in(5)
@pytest.mark.parametrize("rows", quick_first(2, [1, 64, 16]))
@pytest.mark.parametrize("use", USES, ids=str)
def test_all_candidates_are_right(use: ProductUse, rows: int, device: str) -> None:
    configs = candidates(use, rows, device)
    assert use.present(rows, torch.device(device)) == configs[0]
    assert 8 >= len(set(configs)) == len(configs) >= 3
    timed = measure(use, rows, configs, [weight_of(use, device)], torch.device(device))
    assert [item.config for item in timed] == configs


@pytest.mark.parametrize("is_gated", [False, True])
def test_many_rows_of_packed_weights_may_be_left_to_the_library(is_gated: bool, device: str) -> None:
    use = GroupedUse(192, 64, activation="silu" if is_gated else None, number="int4", groups=2)
    for rows in use.row_buckets:
        assert (None in candidates(use, rows, device)) == (rows >= 128)
    head = GroupedUse(1 << 18, 1 << 12, number="int4", groups=32)
    assert None not in candidates(head, 256, device)
    assert head.reference is not None


@pytest.mark.parametrize("use", [LINEAR[0], GROUPED[0]], ids=str)
def test_a_wrong_result_is_never_chosen(use: ProductUse, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = product_tuning._result

    def result(use: ProductUse, given: Operands, weight: Weight, config: Any) -> torch.Tensor:
        return right(use, given, weight, None) * (1.0 if config is None else float("nan"))

    monkeypatch.setattr(product_tuning, "_result", result)
    configs = [*candidates(use, 16, device), None]
    timed = measure(use, 16, configs, [weight_of(use, device)], torch.device(device))
    assert set(timed) == {Timed(10.0, None)}


def test_the_present_configuration_stays_unless_another_is_clearly_faster() -> None:
    present, other = GemvConfig(4, 64, 4), GemvConfig(2, 64, 4)
    assert fastest([Timed(10.0, present), Timed(9.95, other)], present) == present
    assert fastest([Timed(10.0, present), Timed(9.5, other)], present) == other
    assert fastest([Timed(9.5, other)], present) == other  # the present one was wrong
    assert fastest([], present) == present
    assert fastest([Timed(10.0, present), Timed(9.7, None)], present) == present  # cuBLAS must be 5 % faster
    assert fastest([Timed(10.0, present), Timed(9.0, None)], present) is None


def collected(device: str) -> list[ProductCall]:
    """The calls of a pass of two layers."""
    x = torch.zeros(1, 64, device=device, dtype=torch.bfloat16)
    norm = torch.ones(64, device=device, dtype=torch.bfloat16)
    wide = torch.zeros(1, 96, device=device, dtype=torch.bfloat16)
    bias = torch.zeros(64, device=device, dtype=torch.bfloat16)
    with collecting() as calls:
        assert is_compiling()
        for _ in range(2):
            for use in USES:
                weight = weight_of(use, device)
                rows = x if use.K == 64 else wide
                options = bias if use.has_bias else None, norm if use.has_norm else None, 1e-6
                fused = Fused(*options, x if use.has_residual else None, use.activation)
                if isinstance(weight, PackedGroups):
                    found = grouped_linear_triton(rows, weight, fused)
                else:
                    found = linear_triton(rows, weight, fused)
                assert found.shape == (1, 96 if use.N == 192 else use.N)
    return calls


def test_the_products_of_a_model_are_collected_with_their_weights(device: str) -> None:
    uses = uses_of(collected(device))
    assert tuple(uses) == USES
    assert all(len(weights) == 2 and weights[0] is not weights[1] for weights in uses.values())


def test_what_is_in_the_table_is_measured_on_request_alone(
    device: str, tables: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = ProductTuner(uses_of(collected(device)), torch.device(device))
    monkeypatch.setattr(product_tuning, "compiling", lambda num_threads: product_tuning.pdl())
    monkeypatch.setattr(product_tuning, "num_cpus", lambda: 1)
    for kind in (LinearUse, GroupedUse):
        monkeypatch.setattr(kind, "run", lambda self, given, weight, config: None)
    names = [name_of(use, 16) for use in USES]
    assert names[2] == "linear 192x64 gated, 16"
    assert names[5] == "grouped_linear int4/32 192x64 gated, 16"
    assert tuner.prepare(16, again=False) == names
    use_entries({names[0]: {"kernel": "cublas"}, names[3]: {"kernel": "cublas"}}, torch.device(device))
    assert tables == {"linear": {"96x64, 16": None}, "grouped_linear": {"int4/32 96x64, 16": None}}
    assert tuner.prepare(16, again=False) == [*names[1:3], *names[4:]]
    assert tuner.prepare(16, again=True) == names
    assert tuner.prepare(8, again=True) == [name_of(use, 8) for use in GROUPED]  # no bucket of 16-bit weights
    assert tuner.prepare(16, again=True, seconds=0) == names[2:3], "not that with the largest weight alone"


@pytest.mark.parametrize(
    ("use", "fast", "kernel"),
    [
        (LINEAR[0], SkinnyConfig(64, 64, 4, 3), "skinny"),
        (GROUPED[0], GroupedGemmConfig(64, 16, 4, 3), "gemm"),
        (GROUPED[0], GroupedGemvConfig(16, 4, 4, 3), "gemv"),
    ],
    ids=["skinny", "grouped gemm", "grouped gemv"],
)
def test_an_entry_names_the_fastest(
    use: ProductUse,
    fast: object,
    kernel: str,
    device: str,
    tables: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product_tuning, "measure", lambda *args: [Timed(10.0, None), Timed(5.0, fast)])
    tuner = ProductTuner(uses_of(collected(device)), torch.device(device))
    name = name_of(use, 16)
    tuner._prepared[name] = use, 16
    entry = tuner.measure(name)
    assert entry == {"kernel": kernel, **vars(fast)}
    use_entries({name: entry}, torch.device(device))
    assert use.present(16, torch.device(device)) == fast
    assert [len(table) for table in tables.values()].count(1) == 1
    assert tuner.measure("linear 1x1, 16") is None  # of another rank


def test_float32_is_left_to_the_library(device: str) -> None:
    tuner = ProductTuner({LinearUse(96, 64, torch.float32): []}, torch.device(device))
    assert tuner.prepare(16, again=True) == []


def test_a_candidate_that_fails_does_not_stop_the_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_for(kind: type[Any], run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def failing(*args: Any) -> torch.Tensor:
            if isinstance(args[-1], kind):
                raise OutOfResources(300_000, 227_000, "shared memory")
            return run(*args)

        return failing

    monkeypatch.setattr(linear_uses, "run_linear", failing_for(SkinnyConfig, linear_uses.run_linear))
    monkeypatch.setattr(product_tuning, "run_grouped", failing_for(GroupedGemmConfig, product_tuning.run_grouped))
    for use, rows in ((LINEAR[0], 16), (GROUPED[0], 16)):
        tuner = ProductTuner({use: [weight_of(use, device)]}, torch.device(device))
        (name,) = tuner.prepare(rows, again=True)
        configs = candidates(use, rows, device)
        timed = measure(use, rows, configs, [weight_of(use, device)], torch.device(device))
        assert timed
        assert [item.config for item in timed] == [
            config for config in configs if not isinstance(config, (SkinnyConfig, GroupedGemmConfig))
        ]
        entry = tuner.measure(name)
        assert entry is not None
        assert entry["kernel"] == ("cublas" if use is LINEAR[0] else "gemv")


def test_a_reference_that_fails_leaves_the_present_configuration(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for a dense copy")

    monkeypatch.setattr(product_tuning, "run_grouped", fails)
    use = GROUPED[0]
    tuner = ProductTuner({use: [weight_of(use, device)]}, torch.device(device))
    (name,) = tuner.prepare(16, again=True)
    assert tuner.measure(name) == use.table.fields_of(use.present(16, torch.device(device)))
