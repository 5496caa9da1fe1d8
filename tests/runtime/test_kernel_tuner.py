"""The executing side of tuning: what the messages find in a model, and what a measurement changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.engine.kernel_tuning import TUNED_ROWS, TuningPlan, tune_kernels
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear import linear
from octavo.ops.newest_tokens import NewestTokens
from octavo.quant.stored import WeightFormat
from octavo.runtime.drafter import DraftInputs
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.stream_executor import StreamExecutor
from octavo.steps.limits import StepLimits
from octavo.steps.messages import MeasureKernels, PrepareTuning, UseKernels
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.runtime.making import CPU

linear_configs = pytest.importorskip("octavo.ops.triton.linear_configs")
linear_tuning = pytest.importorskip("octavo.ops.triton.linear_tuning")

VOCAB = 97
ENTRY = {"kernel": "cublas"}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table of the device; nothing is compiled or run."""
    found: dict[str, Any] = {}
    for module in (linear_configs, linear_tuning):
        monkeypatch.setattr(module, "table_of", lambda device: found)
    monkeypatch.setattr(linear_tuning, "compiling", lambda num_threads: contextlib.nullcontext())
    monkeypatch.setattr(linear_tuning.Operands, "run", lambda self, weight, config: None)
    monkeypatch.setattr(linear_tuning.LinearTuner, "measure", lambda self, key: ENTRY)
    return found


class OneProduct:
    """A drafter of one linear map."""

    num_drafts, layers = 2, ()

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        ops.linear(torch.zeros(1, 24, dtype=torch.bfloat16), torch.zeros(40, 24, dtype=torch.bfloat16))
        return torch.zeros(len(newest.tokens_S), 2, dtype=torch.int32)

    def remember(self, inputs: DraftInputs) -> None:
        """It has no cache."""


@pytest.fixture(params=[None, OneProduct()], ids=["plain", "drafter"])
def executor(
    request: pytest.FixtureRequest, tmp_path: Path, table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[StreamExecutor]:
    """Of a small Llama in bfloat16, on the CPU, whose linear maps are those for GPUs."""
    from octavo.ops.triton.linear import linear_triton

    make_checkpoint(tmp_path, "gqa")
    source = FolderSource(tmp_path)
    config = read_config(source.config)
    model = load_model(config, source, WeightFormat(torch.bfloat16, CPU)).model
    storage = KVStorage(config.cache, kv_groups(config.cache), [20], 4, torch.bfloat16, CPU)
    with dispatch.only(REFERENCE):
        monkeypatch.setattr(linear, "_choose", lambda *key: linear_triton)
        # On a GPU these are not launched; their references need a step that was uploaded.
        monkeypatch.setattr(ops, "stage_step", lambda *args: None)
        drafts = {} if request.param is None else {"max_drafts": 2, "num_drafts": 2}
        yield StreamExecutor(model, storage, VOCAB, StepLimits(4, 32, 8, **drafts), drafter=request.param)


def num_products(executor: StreamExecutor) -> int:
    """Query-key-value, output, gate-up, down and head; and that of the drafter."""
    return 6 if executor._program.has_drafter else 5


def test_the_products_of_the_loaded_model_are_measured(executor: StreamExecutor) -> None:
    keys = executor.send(PrepareTuning(16)).wait()
    assert len(keys) == len(set(keys)) == num_products(executor)
    assert [key for key in keys if "gated" in key] == [keys[2]]
    assert all(key.endswith(", 16") for key in keys)
    assert executor.send(MeasureKernels(keys[0])).wait() == ENTRY


def test_a_measurement_alone_changes_nothing(executor: StreamExecutor, table: dict[str, Any]) -> None:
    key = executor.send(PrepareTuning(16)).wait()[0]
    executor.send(MeasureKernels(key)).wait()
    assert table == {}
    executor.send(UseKernels({key: ENTRY})).wait()
    assert table == {key: None}
    assert key not in executor.send(PrepareTuning(16)).wait()


def test_a_plan_leaves_nothing_to_measure(executor: StreamExecutor, table: dict[str, Any]) -> None:
    assert tune_kernels(executor.send, TuningPlan()) == num_products(executor) * len(TUNED_ROWS) == len(table)
    assert tune_kernels(executor.send, TuningPlan()) == 0
