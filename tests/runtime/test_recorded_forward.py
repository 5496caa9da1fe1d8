"""The same bits as the plain forward pass, and the plain one where calls cannot be recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.models.registry import load_model, read_config
from octavo.ops.attention import PagedRows
from octavo.quant.scheme import WeightFormat
from octavo.runtime import recorded_forward
from octavo.runtime.forward_batch import ForwardBatch
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.recorded_forward import RecordedForward
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels

pytestmark = needs_float_kernels
CPU = torch.device("cpu")
BLOCK = 4


class Pair:
    """A model with two storages of the same content: one for each way of computing."""

    def __init__(self, folder: Path) -> None:
        make_checkpoint(folder, "gqa")
        source = FolderSource(folder)
        config = read_config(source.config)
        self.model = load_model(config, source, WeightFormat(torch.float32, CPU)).model
        self.storages = [KVStorage(config, 300, BLOCK, torch.float32, CPU) for _ in range(2)]
        for storage in self.storages:
            storage.pool.copy_(torch.randn(storage.pool.shape, generator=torch.Generator().manual_seed(1)))
        self.recorded = RecordedForward(self.model, self.storages[1].layers)

    def compare(self, batch: ForwardBatch) -> None:
        with torch.inference_mode():
            inputs = batch.token_ids_T, batch.positions_T, self.storages[0].layers, batch.rows
            expected, found = self.model.forward(*inputs), self.recorded(batch)
        assert torch.equal(found, expected)
        assert torch.equal(*(storage.pool for storage in self.storages))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def decode_batch(lengths: list[int], seed: int = 0) -> ForwardBatch:
    """One row for each of several contexts."""
    generator, S = torch.Generator().manual_seed(seed), len(lengths)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    width = -(-max(lengths) // BLOCK)
    tables = torch.randperm(300, generator=generator)[: S * width].view(S, width)
    last = seq_lens.long() - 1
    slots = tables[torch.arange(S), last // BLOCK] * BLOCK + last % BLOCK
    rows = PagedRows(slots, tables.int(), torch.arange(S + 1, dtype=torch.int32), seq_lens, 1)
    return ForwardBatch(torch.randint(97, (S,), generator=generator), last, rows, list(range(S + 1)))


def test_repeated_steps_have_the_bits_of_the_plain_pass(pair: Pair) -> None:
    rng = np.random.default_rng(0)
    for step in range(12):
        pair.compare(decode_batch(rng.integers(1, 60, 1 + step % 4).tolist(), step))
    assert len(pair.recorded._steps) == 4


def test_tables_that_grow_get_a_recording_of_their_own(pair: Pair) -> None:
    for length in (100, 128, 129, 30, 500, 129):
        pair.compare(decode_batch([length], length))
    assert sorted(pair.recorded._steps) == [(1, 32), (1, 64), (1, 128)]


def test_long_steps_run_as_they_are_written(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_forward, "MOST_ROWS", 2)
    pair.compare(decode_batch([5, 9, 3]))
    rows = PagedRows(torch.arange(6), *(torch.tensor(x, dtype=torch.int32) for x in ([[0, 1]], [0, 6], [6])), 6)
    pair.compare(ForwardBatch(torch.arange(6), torch.arange(6), rows, [0, 6]))
    assert not pair.recorded._steps


def test_a_model_with_other_operations_runs_as_it_is_written(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = pair.model.embedding  # type: ignore[attr-defined]
    monkeypatch.setattr(pair.model, "embedding", lambda ids: embedding(ids) * 2)
    for seed in range(3):
        pair.compare(decode_batch([5, 9], seed))
    assert not pair.recorded._steps


def test_a_step_that_fails_leaves_the_recording_usable(pair: Pair) -> None:
    pair.compare(decode_batch([5]))
    bad = decode_batch([5])
    bad.token_ids_T[0] = 97
    with torch.inference_mode(), pytest.raises(IndexError, match="from 0 to 96"):
        pair.recorded(bad)
    pair.compare(decode_batch([7], 3))
