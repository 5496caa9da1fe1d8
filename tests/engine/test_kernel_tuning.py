"""When kernels are measured: the deciding side asks for each measurement, and all that comes of it is one message."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import FULL, ModelSettings
from octavo.engine.runner import kernel_tuning
from octavo.engine.runner.kernel_tuning import TUNED_ROWS, TuningPlan, plan_of, tune_kernels
from octavo.steps.messages import MeasureKernels, Message, PrepareTuning, UseKernels, pack, unpack

ENTRY = {"kernel": "cublas"}


class Answer:
    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self) -> Any:
        return self.value


class Measuring:
    """An executor with two products, each of which takes a second."""

    def __init__(self, known: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.now = 0.0
        self.known = set(known)
        self.messages: list[Message] = []

    def send(self, message: Message) -> Answer:
        message = unpack(pack(message))
        self.messages.append(message)
        match message:
            case PrepareTuning(rows, again):
                keys = [f"{name}, {rows}" for name in ("8x4", "4x8")]
                return Answer([key for key in keys if again or key not in self.known])
            case MeasureKernels():
                self.now += 1
                return Answer(ENTRY)
            case UseKernels(entries):
                self.known |= set(entries)
        return Answer(None)


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Measuring:
    found = Measuring()
    monkeypatch.setattr(kernel_tuning.time, "monotonic", lambda: found.now)
    return found


def test_everything_is_measured_once(executor: Measuring) -> None:
    told: list[tuple[float, str]] = []
    plan = TuningPlan(report=lambda share, key: told.append((share, key)))
    assert tune_kernels(executor.send, plan) == 2 * len(TUNED_ROWS)
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert told[-1][0] == 1.0
    assert len(executor.known) == 2 * len(TUNED_ROWS)
    assert tune_kernels(executor.send, TuningPlan()) == 0
    assert tune_kernels(executor.send, TuningPlan(again=True)) == 2 * len(TUNED_ROWS)


def test_a_start_measures_for_a_bounded_time_and_the_next_one_goes_on(executor: Measuring) -> None:
    assert tune_kernels(executor.send, TuningPlan(5)) == 4
    assert executor.known == {"8x4, 16", "4x8, 16", "8x4, 1", "4x8, 1"}
    assert executor.now == 4
    assert tune_kernels(executor.send, TuningPlan(5)) == 4
    assert "4x8, 64" in executor.known


def test_kernels_change_by_one_message_behind_all_measurements(executor: Measuring) -> None:
    tune_kernels(executor.send, TuningPlan(3))
    kinds = [type(message) for message in executor.messages]
    assert kinds.count(UseKernels) == 1
    assert kinds[-1] is UseKernels


def test_without_time_nothing_is_sent(executor: Measuring) -> None:
    assert tune_kernels(executor.send, TuningPlan(0)) == 0
    assert executor.messages == []


def test_measurements_have_no_part_in_batch_invariance() -> None:
    assert plan_of(ModelSettings(kernel_tuning_seconds=7.0)).seconds == 7
    assert plan_of(ModelSettings(kernel_tuning_seconds=7.0, batch_invariant=True)).seconds == 0


def test_a_full_warm_up_measures_all_unless_measuring_is_off() -> None:
    assert plan_of(ModelSettings(kernel_tuning_seconds=7.0, warmup=FULL)).seconds == float("inf")
    assert plan_of(ModelSettings(kernel_tuning_seconds=0.0, warmup=FULL)).seconds == 0
    assert plan_of(ModelSettings(batch_invariant=True, warmup=FULL)).seconds == 0
