"""The search for configurations, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.ops.triton.gemv import GemvConfig
from octavo.ops.triton.launch import counters
from octavo.ops.triton.linear_configs import LinearConfig
from octavo.ops.triton.skinny_gemm import MAX_TILES, SkinnyConfig
from octavo.sim.shapes import SHAPES
from octavo_bench import kernel_tuning
from octavo_bench.kernel_cases import head_case, layer_cases
from octavo_bench.kernel_tuning import MAX_ERROR, Tuner, candidates
from octavo_bench.linear_case import LinearCase, Weights

H200_MULTIPROCESSORS = 132
SMALL = SHAPES["tiny"] | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 80, "head_dim": 16}


@pytest.fixture
def tuner(device: str, monkeypatch: pytest.MonkeyPatch) -> Tuner:
    """For a small model, and few candidates; every call takes 10 us."""
    monkeypatch.setitem(SHAPES, "small", SMALL)
    monkeypatch.setattr(kernel_tuning, "GEMV", [GemvConfig(4, 64, 4), GemvConfig(8, 64, 4, programs=1)])

    def microseconds(calls: Sequence[Callable[[], object]], with_pdl: bool) -> float:
        for call in calls[:1]:
            call()
        return 10.0

    monkeypatch.setattr(kernel_tuning, "microseconds", microseconds)
    where = torch.device(device)
    counters(where, MAX_TILES)
    return Tuner(where, Weights(1 << 20, where))


@pytest.mark.parametrize("rows", [1, 16])
def test_every_map_of_a_model_gets_a_right_configuration(tuner: Tuner, rows: int) -> None:
    maps = [*layer_cases("small"), head_case("small")]
    chosen = tuner.tune(maps, rows)
    assert list(chosen) == maps
    errors = [note["error"] for note in tuner.notes if "error" in note]
    assert len(errors) >= 10
    assert max(errors) < MAX_ERROR
    tuner.compare_chains(list(chosen.items())[:-1], rows)
    assert [note["pdl"] for note in tuner.notes[-4:]] == [False, False, True, True]


def test_the_chain_has_the_last_word(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = GemvConfig(2, 64, 4), GemvConfig(1, 64, 4, release="late")

    def time_chain(cases: Sequence[LinearCase], rows: int, configs: Sequence[LinearConfig]) -> float:
        return 10.0 - configs.count(fast)

    monkeypatch.setattr(tuner, "time_chain", time_chain)
    alone = [(1.0, slow), (2.0, GemvConfig(1, 64, 4))]
    assert tuner.tune_chain(layer_cases("small"), [alone] * 4, 1) == [fast] * 4


def test_wrong_results_are_never_chosen(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearCase, "error", lambda self, rows, weight, config: 0.0 if config is None else float("nan"))
    assert set(tuner.tune([*layer_cases("small"), head_case("small")], 16).values()) == {None}


@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128])
def test_candidates_fit_the_device(rows: int) -> None:
    for case in [*layer_cases("qwen3-8b"), head_case("qwen3-0.6b")]:
        found = list(candidates(case, rows, H200_MULTIPROCESSORS))
        assert None in found
        assert len(found) > 3
        assert len(set(found)) == len(found)
        for config in found:
            if isinstance(config, SkinnyConfig):
                assert case.has_norm or not config.fuses_norm
                assert config.splits * config.block_k <= case.K


def test_layers_of_weights_differ(device: str) -> None:
    cases = [LinearCase("m", "a", 8, 4), LinearCase("m", "b", 4, 8)]
    layers = Weights(2 * 3 * 64, torch.device(device)).layers(cases, 1 << 20)
    assert [[tuple(weight.shape) for weight in layer] for layer in layers] == [[(8, 4), (4, 8)]] * 3
    assert len({weight.data_ptr() for layer in layers for weight in layer}) == 6
    with pytest.raises(ConfigError, match="two layers do not fit"):
        Weights(100, torch.device(device)).layers(cases, 1 << 20)


class Unhurried:
    """Instead of a tuner on a device: every turn takes ten seconds."""

    now = 0.0

    def __init__(self, *args: object) -> None:
        self.notes: list[dict[str, object]] = []

    def tune(self, maps: Sequence[LinearCase], rows: int) -> dict[LinearCase, LinearConfig]:
        Unhurried.now += 10
        return {maps[0]: GemvConfig(rows, 64, 4)}

    def compare_chains(self, chosen: Sequence[tuple[LinearCase, LinearConfig]], rows: int) -> None:
        self.notes.append({"rows": rows})


class NoCompiler:
    def start(self, jobs: object, with_pdl: bool = True) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def test_what_comes_first_is_tuned_first_until_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"Tuner": Unhurried, "Compiler": NoCompiler, "Weights": lambda *args: None}.items():
        monkeypatch.setattr(kernel_tuning, name, value)
    monkeypatch.setattr(kernel_tuning, "table_path", lambda gpu: tmp_path / "table.json")
    monkeypatch.setattr(kernel_tuning, "num_multiprocessors", lambda device: H200_MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(kernel_tuning.time, "perf_counter", lambda: Unhurried.now)
    kept: list[float] = []
    models = [[LinearCase(name, "qkv", len(name), 64)] for name in ("long", "tiny0")]
    notes = kernel_tuning.tune(models, [100, 3, 9, 1], lambda: kept.append(Unhurried.now), deadline=45)
    assert kept == [10, 20, 30, 40]
    assert set(kernel_tuning.read_table(tmp_path / "table.json")) == {"4x64, 128", "5x64, 128", "4x64, 16", "5x64, 16"}
    assert [note["rows"] for note in notes] == [128, 128, 16, 16]


@pytest.mark.parametrize("name", ["qwen", "gpt2"])
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        layer_cases(name)
