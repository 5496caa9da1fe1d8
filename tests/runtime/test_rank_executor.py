"""What ranks must agree about: results, adapters, contents of blocks; and that a failure on one ends all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from octavo.errors import CheckpointError, RanksLost, RunnerError
from octavo.ops.collective import Collective
from octavo.ops.device_backend import RankMemory
from octavo.runtime.ranks.rank_executor import Follower, RankExecutor
from octavo.runtime.replies import Done, FailedReply
from octavo.steps.graph_shapes import StepShape
from octavo.steps.messages import (
    Compile,
    LoadAdapter,
    Message,
    ReadPlaces,
    Reply,
    Step,
    StepResult,
    UnloadAdapter,
    WritePlaces,
)
from tests.runtime.thread_ranks import make_ranks

STEP = Step(StepShape(1, 1, 1), False, 1, 1, bytearray())


class Rank:
    """An executor without a model: a step meets the other ranks, as a forward pass does."""

    runs_ahead = False

    def __init__(self, collective: Collective, answer: Callable[[int, int], Reply[Any]]) -> None:
        """``answer`` is given the rank and the number of the step."""
        self.collective, self.answer = collective, answer
        self.num_steps = 0
        self.adapters: set[int] = set()
        self.blocks = {block: bytes([10 * block + collective.rank] * 3) for block in range(3)}

    def send(self, message: Message) -> Reply[Any]:
        match message:
            case Step():
                self.collective.all_gather(torch.zeros(1))
                self.num_steps += 1
                return self.answer(self.collective.rank, self.num_steps - 1)
            case LoadAdapter(number, path):
                if path == f"not on {self.collective.rank}":
                    return FailedReply(CheckpointError("no such folder"))
                self.adapters.add(number)
            case UnloadAdapter(number):
                self.adapters.discard(number)
            case ReadPlaces(_, blocks):
                return Done(b"".join(self.blocks[block] for block in blocks))
            case WritePlaces(_, blocks, contents):
                self.blocks.update(zip(blocks, contents, strict=True))
        return Done(None)


def make(answer: Callable[[int, int], Reply[Any]] = lambda rank, number: Done(StepResult([number]))) -> Any:
    made: list[Rank] = []

    def rank(memory: RankMemory) -> Rank:
        made.append(Rank(memory.collective, answer))
        return made[-1]

    return make_ranks(3, rank), made


def test_equal_results_are_those_of_the_first_rank() -> None:
    ranks, _ = make()
    assert [ranks.send(STEP).wait().tokens for _ in range(50)] == [[number] for number in range(50)]
    ranks.close()


@pytest.mark.parametrize(
    "result",
    [
        lambda number: StepResult([number]),
        lambda number: StepResult([1], [number]),
        lambda number: StepResult([1], [1], drafts=[[2, 3], [4, number]]),
    ],
    ids=["tokens", "accepted drafts", "drafts"],
)
def test_a_result_that_differs_ends_the_ranks_in_the_next_step(result: Callable[[int], StepResult]) -> None:
    ranks, _ = make(lambda rank, number: Done(result(number + (rank == 2 and number == 7))))
    for _ in range(8):
        ranks.send(STEP).wait()
    with pytest.raises(RanksLost, match="ranks 0 and 2 have different results in step 7"):
        ranks.send(STEP).wait()


def test_a_step_that_fails_on_one_rank_ends_the_ranks() -> None:
    ranks, _ = make(lambda rank, number: FailedReply(RunnerError("no memory")) if rank == 0 else Done(StepResult([1])))
    with pytest.raises(RanksLost, match="no memory"):
        ranks.send(STEP).wait()


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_an_adapter_is_loaded_on_all_ranks_or_on_none(lacking: int) -> None:
    ranks, made = make()
    ranks.send(LoadAdapter(4, "everywhere")).wait()
    with pytest.raises(CheckpointError, match="no such folder" if lacking == 0 else f"rank {lacking} cannot load it"):
        ranks.send(LoadAdapter(5, f"not on {lacking}")).wait()
    ranks.send(STEP).wait()
    ranks.close()
    assert [rank.adapters for rank in made] == [{4}] * 3


def test_a_block_is_the_parts_of_all_ranks() -> None:
    ranks, made = make()
    content = ranks.send(ReadPlaces("blocks", [2, 0])).wait()
    assert content == bytes([20, 20, 20, 21, 21, 21, 22, 22, 22, 0, 0, 0, 1, 1, 1, 2, 2, 2])
    ranks.send(WritePlaces("blocks", [1, 2], [bytes(range(9)), bytes(range(9, 18))])).wait()
    ranks.close()
    for block, first in ((1, 0), (2, 9)):
        assert b"".join(rank.blocks[block] for rank in made) == bytes(range(first, first + 9))


class Endless:
    """A reply that does not come, which nobody may wait for."""

    def wait(self) -> None:
        raise AssertionError("it was waited for")


def test_other_ranks_do_not_wait_for_what_is_compiled_in_the_background() -> None:
    class Compiler:
        num_ahead = 0

        def send(self, message: Message) -> Reply[Any]:
            return Endless() if isinstance(message, Compile) else Done(None)

    follower = Follower(cast(RankExecutor, Compiler()))
    follower.execute(Compile([], in_background=True))
    follower.execute(UnloadAdapter(1))
    with pytest.raises(AssertionError, match="waited for"):
        follower.execute(Compile([]))
