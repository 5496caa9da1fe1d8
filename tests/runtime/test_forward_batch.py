"""Plans as tensors."""

from __future__ import annotations

import gc

import pytest
import torch

from octavo.runtime.forward_batch import BatchBuilder
from octavo.sampling_params import SamplingParams
from octavo.types import Request, Scheduled, Sequence


@pytest.fixture
def builder() -> BatchBuilder:
    return BatchBuilder(4, torch.device("cpu"))


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    seq = Sequence(Request(0, tokens, SamplingParams(), 10))
    seq.groups[0].block_table = blocks
    return seq


def item(
    seq: Sequence, start: int, tokens: tuple[int | None, ...], drafts: tuple[int, ...] = (), samples: bool = True
) -> Scheduled:
    return Scheduled(seq, start, tokens, drafts, samples, 0)


def test_rows_of_a_mixed_plan(builder: BatchBuilder) -> None:
    chunk = sequence([10, 11, 12, 13, 14, 15], [7, 3])
    decode = sequence([20] * 9, [5, 1, 2])
    verify = sequence([30, 31], [9, 8])
    batch = builder.build(
        [item(chunk, 2, (12, 13, 14)), item(decode, 8, (None,)), item(verify, 1, (31,), (40, 41, 42))]
    )
    assert batch.token_ids_T.tolist() == [12, 13, 14, 20, 31, 40, 41, 42]
    assert batch.positions_T.tolist() == [2, 3, 4, 8, 1, 2, 3, 4]
    rows = batch.rows
    assert rows.groups[0].slot_mapping_T.tolist() == [30, 31, 12, 8, 37, 38, 39, 32]
    assert rows.groups[0].block_tables_SB.tolist() == [[7, 3, 0], [5, 1, 2], [9, 8, 0]]
    assert rows.cu_seqlens_q.tolist() == batch.first_rows == [0, 3, 4, 8]
    assert rows.seq_lens_S.tolist() == [5, 9, 5]
    dtypes = [
        t.dtype
        for t in (rows.groups[0].slot_mapping_T, rows.groups[0].block_tables_SB, rows.cu_seqlens_q, rows.seq_lens_S)
    ]
    assert dtypes == [torch.int64, torch.int32, torch.int32, torch.int32]


def test_tables_are_extended_and_reread_when_their_version_grows(builder: BatchBuilder) -> None:
    seq = sequence([1] * 200, [1])

    def table(start: int) -> list[int]:
        rows: list[int] = builder.build([item(seq, start, (1,))]).rows.groups[0].block_tables_SB[0].tolist()
        return rows

    assert table(0) == [1]
    seq.groups[0].block_table += [2, 3]
    assert table(4) == [1, 2]  # blocks beyond the positions computed are left out
    seq.groups[0].block_table[0] = 99
    assert table(8) == [1, 2, 3]  # an entry changed without its version: contents are equal by contract
    seq.groups[0].table_version += 1
    assert table(8) == [99, 2, 3]
    seq.groups[0].block_table = list(range(100, 150))
    seq.groups[0].table_version += 1
    assert table(199) == list(range(100, 150))


def test_a_token_that_is_not_committed_or_a_missing_block_is_a_mistake(builder: BatchBuilder) -> None:
    seq = sequence([1, 2, 3, 4, 5], [1])
    with pytest.raises(AssertionError, match="fewer blocks"):
        builder.build([item(seq, 4, (5,))])
    seq.tokens[2] = None
    with pytest.raises(AssertionError, match="before its token is committed"):
        builder.build([item(seq, 2, (None,))])


def test_sequences_are_forgotten_when_they_are_gone(builder: BatchBuilder) -> None:
    seqs = [sequence([1], [i]) for i in range(50)]
    builder.build([item(seq, 0, (1,)) for seq in seqs])
    assert len(builder._tables) == 50
    del seqs
    gc.collect()
    assert len(builder._tables) == 0
