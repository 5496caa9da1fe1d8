"""Batch indices are of one sequence at a time."""

from __future__ import annotations

from octavo.engine.runner.persistent_batch import PersistentBatch
from octavo.types import GroupBlocks, Sequence, Status
from tests.engine.making import make_request


def sequence(number: int) -> Sequence:
    seq = Sequence(make_request(number), groups=[GroupBlocks()])
    seq.status = Status.RUNNING
    return seq


def test_a_sequence_that_was_preempted_and_runs_again_keeps_its_index_for_itself() -> None:
    batch, seqs = PersistentBatch(4, 8), [sequence(number) for number in range(8)]
    for seq in seqs[:4]:
        batch.of(seq)
    for seq in seqs[:3]:
        seq.status = Status.WAITING
    taken = batch.of(seqs[4])  # indices of sequences that wait are free
    again = next(seq for seq in seqs[:3] if seq.batch_index != taken)
    again.status = Status.RUNNING
    kept = batch.of(again)
    assert kept not in (taken, batch.of(seqs[5]), batch.of(seqs[3]))
    assert batch.of(again) == kept
