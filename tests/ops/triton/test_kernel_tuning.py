"""Making the shipped tables: which shapes there are, and what is done until the deadline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo_bench import kernel_tuning
from octavo_bench.kernel_cases import SERVED, head_case, layer_cases
from octavo_bench.kernel_tuning import kernel_key
from octavo_bench.linear_case import LinearCase, Weights
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.linear_configs import TABLE, LinearConfig
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig
from octavo_kernels.triton.tuning.linear_uses import LinearUse
from octavo_kernels.triton.tuning.product_tuning import Timed


@pytest.mark.parametrize("name", ["qwen", "gpt2"])
def test_other_models_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        layer_cases(name)


def test_all_models_that_people_serve_have_cases() -> None:
    for name in SERVED:
        assert all(case.K % 64 == 0 and case.N for case in [*layer_cases(name), head_case(name)])


def test_matrices_of_a_model() -> None:
    assert [(case.N, case.K) for case in layer_cases("llama-3.1-8b")] == [
        (6144, 4096),
        (4096, 4096),
        (28_672, 4096),
        (4096, 14_336),
    ]
    gemma = layer_cases("gemma-3-27b")
    assert [case.has_residual for case in gemma] == [False] * 4
    assert gemma[2].activation == "gelu_tanh"


def test_weights_differ(device: str) -> None:
    weights = Weights(2 * 3 * 64, torch.device(device)).of(8, 8, 1 << 20)
    assert [tuple(weight.shape) for weight in weights] == [(8, 8)] * 3
    assert len({weight.data_ptr() for weight in weights}) == 3
    with pytest.raises(ConfigError, match="two weights do not fit"):
        Weights(100, torch.device(device)).of(8, 8, 1 << 20)


def test_a_kernel_is_compiled_once() -> None:
    tile = SkinnyConfig(64, 64, 4, 4)
    assert kernel_key(LinearUse(128, 256), 16, tile) == kernel_key(LinearUse(512, 1024), 16, tile)
    assert kernel_key(LinearUse(128, 256), 16, tile) != kernel_key(LinearUse(128, 250), 16, tile)
    assert kernel_key(LinearUse(128, 256), 1, GemvConfig(4, 64, 4)) != kernel_key(
        LinearUse(128, 512), 1, GemvConfig(4, 64, 4)
    )


class NoCompiler:
    def start(self, jobs: object) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class NoWeights:
    def __init__(self, *args: object) -> None:
        pass

    def of(self, *args: object) -> list[torch.Tensor]:
        return []


def test_what_comes_first_is_tuned_first_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    now, fast = [0.0], GemvConfig(4, 64, 4)

    def measure(use: LinearUse, rows: int, configs: Sequence[LinearConfig], *rest: object) -> list[Timed]:
        now[0] += 10
        return [Timed(1.0, fast)]

    for name, value in {"measure": measure, "Compiler": NoCompiler, "Weights": NoWeights}.items():
        monkeypatch.setattr(kernel_tuning, name, value)
    monkeypatch.setattr(kernel_tuning, "table_path", lambda gpu: tmp_path / "table.json")
    monkeypatch.setattr(LinearUse, "candidates", lambda *args: [fast])
    monkeypatch.setattr(LinearUse, "present", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(kernel_tuning.time, "perf_counter", lambda: now[0])
    kept: list[float] = []
    uses = [LinearCase("m", name, N, 64).use for name, N in (("a", 8), ("b", 16), ("again", 8))]
    notes = kernel_tuning.tune(uses, [100, 3, 9, 1], lambda: kept.append(now[0]), deadline=45)
    assert kept == [10, 20, 30, 40, 50]
    table = TABLE.read(tmp_path / "table.json")
    assert set(table) == {"8x64, 128", "16x64, 128", "8x64, 16", "16x64, 16", "8x64, 1"}
    assert set(table.values()) == {fast}
    assert [note["shape"] for note in notes][:2] == ["8x64, 128", "16x64, 128"]
