"""Finding who makes a forward pass fail."""

from __future__ import annotations

import pytest

from octavo.engine.fault_isolation import FaultIsolation
from octavo.types import Plan, Scheduled, Sequence, Status
from tests.engine.making import make_engine, make_request, run_to_end, tokens_of
from tests.oracle import OracleRunner, Trouble, expected_output


def make_plan(*sequences: Sequence) -> Plan:
    return [Scheduled(seq, 0, (1,), (), True, seq.epoch) for seq in sequences]


def make_sequences(count: int) -> list[Sequence]:
    return [Sequence(make_request(request_id)) for request_id in range(count)]


def sequences_of(plan: Plan) -> list[Sequence]:
    return [item.seq for item in plan]


def test_halves_are_tried_one_after_the_other() -> None:
    a, b, c = make_sequences(3)
    suspects = FaultIsolation()
    plan = make_plan(a, b, c)
    assert suspects.accuse(plan, plan) is None
    first = suspects.next_group()
    assert sequences_of(first) == [a, b]
    suspects.begin(first)
    assert suspects.next_group() == [], "a trial is alone"
    assert suspects.is_active
    suspects.acquit(first)
    second = suspects.next_group()
    assert sequences_of(second) == [c]
    suspects.begin(second)
    assert suspects.is_active
    suspects.acquit(second)
    assert not suspects.is_active


def test_a_finished_sequence_is_not_suspected() -> None:
    a, b = make_sequences(2)
    suspects = FaultIsolation()
    plan = make_plan(a, b)
    suspects.accuse(plan, plan)
    a.status = b.status = Status.FINISHED
    assert not suspects.is_active
    assert suspects.next_group() == []


def test_a_single_failure_alone_fails_no_sequence() -> None:
    (a,) = make_sequences(1)
    suspects = FaultIsolation()
    plan = make_plan(a)
    assert suspects.accuse(plan, plan) is None
    trial = suspects.next_group()
    suspects.begin(trial)
    assert suspects.accuse(trial, trial) is a
    assert not suspects.is_active


def test_an_acquittal_wipes_the_slate_clean() -> None:
    (a,) = make_sequences(1)
    suspects = FaultIsolation()
    for _ in range(3):
        plan = make_plan(a)
        assert suspects.accuse(plan, plan) is None
        trial = suspects.next_group()
        suspects.begin(trial)
        suspects.acquit(trial)


def test_a_trial_waits_for_steps_in_flight() -> None:
    a, b = make_sequences(2)
    suspects = FaultIsolation()
    plan = make_plan(a, b)
    suspects.accuse(plan, plan)
    a.num_in_flight = 1
    assert suspects.next_group() == []
    a.num_in_flight = 0
    assert sequences_of(suspects.next_group()) == [a]


def test_a_finished_sequence_is_not_tried() -> None:
    a, b = make_sequences(2)
    suspects = FaultIsolation()
    plan = make_plan(a, b)
    suspects.accuse(plan, plan)
    a.status = Status.FINISHED
    assert sequences_of(suspects.next_group()) == [b]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("position", [0, 5, 12])
def test_one_poisonous_request_of_32_is_failed_and_the_others_finish(depth: int, position: int) -> None:
    trouble = Trouble(poison={13: position})
    engine, runner = make_engine(
        num_blocks=256, max_num_seqs=32, max_num_batched_tokens=512, trouble=trouble, depth=depth
    )
    requests = [make_request(request_id, prompt=6, max_tokens=12) for request_id in range(32)]
    for request in requests:
        engine.add(request)
    outputs = run_to_end(engine)
    for request in requests:
        expected, reason = expected_output(request)
        if request.id == 13:
            assert outputs[13][-1].finish_reason == "error"
            assert outputs[13][-1].error == "device fault"
            assert tokens_of(outputs[13]) == expected[: max(0, position - 5)]
        else:
            assert tokens_of(outputs[request.id]) == expected
            assert outputs[request.id][-1].finish_reason == reason
    assert runner.num_failed_steps <= 5 + 2 + (depth - 1)
    assert engine.stats().num_faults == runner.num_failed_steps


def test_a_dead_device_ends_all_sequences_with_an_error() -> None:
    engine, runner = make_engine(max_num_seqs=8, trouble=Trouble(fault_rate=1.0))
    for request_id in range(8):
        engine.add(make_request(request_id))
    outputs = run_to_end(engine)
    assert {outputs[request_id][-1].finish_reason for request_id in range(8)} == {"error"}
    assert runner.num_failed_steps < 8 * 4


class FailsAt(Trouble):
    """Fails the steps with these numbers, whatever is in them."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.num_seen = 0

    def strikes(self, plan: Plan) -> bool:
        self.num_seen += 1
        return self.num_seen in self.steps


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_requests", [1, 2])
def test_random_failures_end_no_sequence(depth: int, num_requests: int) -> None:
    engine, _ = make_engine(trouble=FailsAt(1, 5, 9) if num_requests == 1 else FailsAt(1, 2), depth=depth)
    requests = [make_request(request_id, prompt=6, max_tokens=12) for request_id in range(num_requests)]
    for request in requests:
        engine.add(request)
    outputs = run_to_end(engine)
    for request in requests:
        assert tokens_of(outputs[request.id]) == expected_output(request)[0]


def test_a_trial_runs_without_other_sequences() -> None:
    engine, runner = make_engine(trouble=FailsAt(2), depth=2)
    for request_id in range(4):
        engine.add(make_request(request_id, max_tokens=8))
    engine.step()
    engine.step()
    engine.add(make_request(9))
    num_plans = len(runner.plans)
    run_to_end(engine)
    trials = [[item.seq.id for item in plan] for plan in runner.plans[num_plans : num_plans + 2]]
    assert trials == [[0, 1], [2, 3]]


def test_suspects_may_be_aborted() -> None:
    engine, _ = make_engine(trouble=FailsAt(1))
    for request_id in range(4):
        engine.add(make_request(request_id))
    engine.step()
    for request_id in range(3):
        engine.abort(request_id)
    assert set(run_to_end(engine)) == {3}
    assert engine.stats().num_used_blocks == 0


def test_the_oracle_notices_a_forgotten_rewind() -> None:
    """What keeps the tests above honest: garbage of a failed step is not taken for keys and values."""
    runner = OracleRunner(4, FailsAt(1))
    engine, _ = make_engine()
    engine.runner = runner
    engine.add(make_request(0, prompt=6))
    engine.scheduler._rewind = lambda item: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        run_to_end(engine)
