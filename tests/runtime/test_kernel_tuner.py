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
from octavo.engine.runner.kernel_tuning import TUNED_ROWS, TuningPlan, tune_kernels
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.ops.drafting import NewestTokens
from octavo.ops.linear.grouped_linear import grouped_linear
from octavo.ops.linear.linear import linear
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.drafting.drafter import DraftInputs
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.limits import StepLimits
from octavo.steps.messages import MeasureKernels, PrepareTuning, UseKernels
from octavo_kernels.triton.backend import BACKEND
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.runtime.making import CPU

product_tuning = pytest.importorskip("octavo_kernels.triton.tuning.product_tuning")

VOCAB = 97
ENTRY = {"kernel": "cublas"}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The tables of the device; nothing is compiled or run."""
    found: dict[str, dict[str, Any]] = {"linear": {}, "grouped_linear": {}}
    monkeypatch.setattr(product_tuning.ConfigTable, "of", lambda self, device: found[self.section])
    monkeypatch.setattr(product_tuning, "compiling", lambda num_threads: contextlib.nullcontext())
    for kind in (product_tuning.LinearUse, product_tuning.GroupedUse):
        monkeypatch.setattr(kind, "run", lambda self, given, weight, config: None)
    monkeypatch.setattr(product_tuning.ProductTuner, "measure", lambda self, name: ENTRY)
    return found


class OneProduct:
    """A drafter of one linear map."""

    num_drafts, layers = 2, ()

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        ops.linear(torch.zeros(1, 24, dtype=torch.bfloat16), torch.zeros(40, 24, dtype=torch.bfloat16))
        return torch.zeros(len(newest.tokens_S), 2, dtype=torch.int32)

    def remember(self, inputs: DraftInputs) -> None:
        """It has no cache."""


SECTIONS = {
    "plain": 5 * ["linear"],
    "drafter": 6 * ["linear"],
    "int4": [*4 * ["grouped_linear"], "linear"],
}
"""By model, the tables of its products: query-key-value, output, gate-up, down and head; and that of the drafter."""


@pytest.fixture(params=SECTIONS)
def model_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def executor(
    model_name: str, tmp_path: Path, tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[StreamExecutor]:
    """Of a small Llama in bfloat16, on the CPU, whose linear maps are those for GPUs; of INT4 all but the head."""
    from octavo_kernels.triton.grouped.grouped_linear import grouped_linear_triton
    from octavo_kernels.triton.linear.linear import linear_triton

    monkeypatch.setattr("octavo.runtime.executors.device_program.backend_of", lambda device_type: BACKEND)
    make_checkpoint(tmp_path, "gqa")
    source = FolderSource(tmp_path)
    config = read_config(source.config)
    monkeypatch.setattr(grouped_linear, "chosen", lambda device, dtype: "triton")
    packed = {"packs": True, "quantization": "int4"} if model_name == "int4" else {}
    model = load_model(config, source, WeightFormat(torch.bfloat16, CPU, **packed)).model
    storage = KVStorage(config.cache, kv_groups(config.cache), [20], 4, torch.bfloat16, CPU)
    with dispatch.only(REFERENCE):
        monkeypatch.setattr(linear, "_choose", lambda *key: linear_triton)
        monkeypatch.setattr(grouped_linear, "_choose", lambda *key: grouped_linear_triton)
        # On a GPU these are not launched; their references need a step that was uploaded.
        monkeypatch.setattr(ops, "stage_step", lambda *args: None)
        drafts = {"max_drafts": 2, "num_drafts": 2} if model_name == "drafter" else {}
        drafter = OneProduct() if drafts else None
        yield StreamExecutor(model, storage, VOCAB, StepLimits(4, 32, 8, **drafts), drafter=drafter)


def test_the_products_of_the_loaded_model_are_measured(executor: StreamExecutor, model_name: str) -> None:
    names = executor.send(PrepareTuning(16)).wait()
    assert [name.split()[0] for name in names] == SECTIONS[model_name]
    assert len(names) == len(set(names))
    assert [name for name in names if "gated" in name] == [names[2]]
    assert all(name.endswith(", 16") for name in names)
    assert executor.send(MeasureKernels(names[0])).wait() == ENTRY


def test_a_measurement_alone_changes_nothing(executor: StreamExecutor, tables: dict[str, dict[str, Any]]) -> None:
    name = executor.send(PrepareTuning(16)).wait()[0]
    executor.send(MeasureKernels(name)).wait()
    assert tables == {"linear": {}, "grouped_linear": {}}
    executor.send(UseKernels({name: ENTRY})).wait()
    section, key = name.split(" ", 1)
    assert tables == {"linear": {}, "grouped_linear": {}} | {section: {key: None}}
    assert name not in executor.send(PrepareTuning(16)).wait()


def test_a_plan_leaves_nothing_to_measure(
    executor: StreamExecutor, model_name: str, tables: dict[str, dict[str, Any]]
) -> None:
    buckets = {"linear": set(TUNED_ROWS) - {8}, "grouped_linear": set(TUNED_ROWS)}
    expected = {section: SECTIONS[model_name].count(section) * len(rows) for section, rows in buckets.items()}
    assert tune_kernels(executor.send, TuningPlan()) == sum(expected.values())
    assert {section: len(table) for section, table in tables.items()} == expected
    assert tune_kernels(executor.send, TuningPlan()) == 0
