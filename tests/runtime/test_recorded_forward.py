"""The same bits as the plain forward pass, and the plain one where calls cannot be recorded."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors import recorded_forward
from octavo.runtime.executors.forward import make_forward
from octavo.runtime.executors.recorded_forward import RecordedCall, RecordedForward
from octavo.runtime.kv_storage import KVStorage
from octavo_kernels.cpu.backend import BACKEND
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.models.families import make_checkpoint as make_family
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import nightly_after

pytestmark = needs_float_kernels
CPU = torch.device("cpu")
BLOCK = 4


class Batch(NamedTuple):
    """What a forward pass takes."""

    token_ids_T: Tensor
    positions_T: Tensor
    rows: PagedRows


class Pair:
    """A model with two storages of the same content: one for each way of computing."""

    def __init__(self, folder: Path) -> None:
        make_checkpoint(folder, "gqa")
        source = FolderSource(folder)
        config = read_config(source.config)
        self.model = load_model(config, source, WeightFormat(torch.float32, CPU)).model
        self.storages = [
            KVStorage(config.cache, kv_groups(config.cache), [300], BLOCK, torch.float32, CPU) for _ in range(2)
        ]
        for storage in self.storages:
            storage.pools[0][0].copy_(
                torch.randn(storage.pools[0][0].shape, generator=torch.Generator().manual_seed(1))
            )
        recorded = make_forward(self.model, self.storages[1].layers, CPU)
        assert isinstance(recorded, RecordedForward)
        self.recorded = recorded

    def compare(self, batch: Batch) -> None:
        with torch.inference_mode():
            token_ids_T, positions_T, rows = batch
            expected = self.model.forward(token_ids_T, positions_T, self.storages[0].layers, rows)
            found = self.recorded(*batch)
        assert torch.equal(found, expected)
        assert torch.equal(*(storage.pools[0][0] for storage in self.storages))


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def mixed_batch(rows_and_lengths: list[tuple[int, int]], seed: int = 0) -> Batch:
    """Some rows for each of several contexts; ``lengths`` include them."""
    generator, S = torch.Generator().manual_seed(seed), len(rows_and_lengths)
    seq_lens = torch.tensor([length for _, length in rows_and_lengths], dtype=torch.int32)
    counts = [count for count, _ in rows_and_lengths]
    first_rows = [0, *itertools.accumulate(counts)]
    width = -(-max(seq_lens.tolist()) // BLOCK)
    tables = torch.randperm(300, generator=generator)[: S * width].view(S, width)
    positions = torch.cat([torch.arange(length - count, length) for count, length in rows_and_lengths])
    of_row = torch.repeat_interleave(torch.arange(S), torch.tensor(counts))
    slots = tables[of_row, positions // BLOCK] * BLOCK + positions % BLOCK
    rows = PagedRows(
        (GroupRows(slots, tables.int()),), torch.tensor(first_rows, dtype=torch.int32), seq_lens, max(counts)
    )
    return Batch(torch.randint(97, (len(slots),), generator=generator), positions, rows)


def decode_batch(lengths: list[int], seed: int = 0) -> Batch:
    """One row for each of several contexts."""
    return mixed_batch([(1, length) for length in lengths], seed)


def test_repeated_steps_have_the_bits_of_the_plain_pass(pair: Pair) -> None:
    rng = np.random.default_rng(0)
    for step in range(12):
        pair.compare(decode_batch(rng.integers(1, 60, 1 + step % 4).tolist(), step))
    assert len(pair.recorded._steps) == 4


def test_sequences_of_several_rows_take_part(pair: Pair) -> None:
    """Chunks of prompts and guesses, of as many rows as a step of single ones before, or after."""
    rng = np.random.default_rng(1)
    for step in range(40):
        num_rows, parts = 8, []
        while num_rows:
            count = int(rng.integers(1, num_rows + 1))
            parts.append((count, count + int(rng.integers(0, 30))))
            num_rows -= count
        batch = mixed_batch(parts, step)
        pair.compare(batch)
        last_R = batch.rows.cu_seqlens_q[1:].long() - 1
        pair.compare(batch._replace(rows=replace(batch.rows, logits_indices_R=last_R)))
    assert sorted(form[:4] for form in pair.recorded._steps) == [(8, 32, 8, 0)]


def test_tables_that_grow_get_a_recording_of_their_own(pair: Pair) -> None:
    for length in (100, 128, 129, 30, 500, 129):
        pair.compare(decode_batch([length], length))
    assert sorted(form[:4] for form in pair.recorded._steps) == [(1, 32, 1, 0), (1, 64, 1, 0), (1, 128, 1, 0)]


def test_long_steps_run_as_they_are_written(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_forward, "SHORT", 2)
    monkeypatch.setattr(recorded_forward, "LONGEST", 6)
    for batch in (decode_batch([5, 9, 3]), mixed_batch([(6, 6)]), mixed_batch([(7, 7)]), mixed_batch([(7, 7)])):
        pair.compare(batch)
    assert not pair.recorded._steps


def test_a_second_long_step_of_the_same_form_is_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_forward, "SHORT", 2)
    for step, parts in enumerate(
        [[(6, 6)], [(6, 20)], [(6, 12)], [(4, 9), (2, 3)], [(3, 9), (3, 30)], [(5, 5), (1, 8)]]
    ):
        batch = mixed_batch(parts, step)
        last_R = batch.rows.cu_seqlens_q[1:].long() - 1
        pair.compare(batch._replace(rows=replace(batch.rows, logits_indices_R=last_R)))
    assert sorted(form[:4] for form in pair.recorded._steps) == [(6, 32, 1, 1), (6, 32, 2, 2)]
    pair.compare(batch)
    pair.compare(batch)
    assert (6, 32, 2, 0, False) in pair.recorded._steps


def test_few_long_steps_are_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_forward, "SHORT", 2)
    for count in range(3, 4 + recorded_forward.MOST_LONG):
        for seed in range(3):
            pair.compare(mixed_batch([(count, count + seed)], seed))
    assert [form.T for form in pair.recorded._steps] == list(range(4, 4 + recorded_forward.MOST_LONG))


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
        pair.recorded(*bad)
    pair.compare(decode_batch([7], 3))


def test_logits_are_repeated_on_the_same_memory(pair: Pair) -> None:
    logits = RecordedCall(pair.model.logits, BACKEND.recorder())
    places, others = torch.empty(3, pair.model.config.hidden_size), torch.empty(2, pair.model.config.hidden_size)  # type: ignore[attr-defined]
    found = list[Tensor]()
    with torch.inference_mode():
        for turn, x_RD in enumerate([places, places, places, others, places, places, places[:2], places[:2]]):
            x_RD.normal_(generator=torch.Generator().manual_seed(turn))
            found.append(logits(x_RD))
            assert torch.equal(found[-1], pair.model.logits(x_RD))
    memories = [x_RV.data_ptr() for x_RV in found]
    assert memories[1] == memories[2]
    assert logits._made is not None


def test_logits_with_other_operations_are_never_recorded(pair: Pair) -> None:
    logits = RecordedCall(lambda x_RD: pair.model.logits(x_RD).tanh(), BACKEND.recorder())
    x_RD = torch.empty(3, pair.model.config.hidden_size)  # type: ignore[attr-defined]
    with torch.inference_mode():
        for turn in range(4):
            x_RD.normal_(generator=torch.Generator().manual_seed(turn))
            assert torch.equal(logits(x_RD), pair.model.logits(x_RD).tanh())
    assert logits._made is None


WIDTHS = {"moe_intermediate_size": 32, "intermediate_size": 64}
"""Multiples of 16, as those of heads are: other widths are padded, which is not recorded."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe/normalised": WIDTHS,
    "qwen3_5_moe/experts": WIDTHS | {"shared_expert_intermediate_size": 32},
    "lfm2_moe/experts": WIDTHS | {"hidden_size": 64},
    "granitemoehybrid/experts": {"intermediate_size": 32, "shared_intermediate_size": 32},
    "gpt_oss/sinks": {"intermediate_size": 32},
    "nemotron_h/experts": WIDTHS | {"moe_shared_expert_intermediate_size": 32},
    "minimax_m2/partly_rotated": {"intermediate_size": 32},
    "flex_olmo/normed_experts": {"hidden_size": 64, "intermediate_size": 32},
    "olmo2/one_kv_head": {"num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 64},
}


@pytest.mark.parametrize("row", nightly_after(1, list(MIXTURES)))
def test_steps_of_mixtures_are_recorded(tmp_path: Path, row: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the tokens of unrecorded steps, and of each sequence alone."""
    make_family(tmp_path, row, **MIXTURES[row])
    greedy = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0, logprobs=0)
    prompts: list[Any] = [{"prompt_token_ids": list(range(5 + 3 * i, 9 + 7 * i))} for i in range(3)]
    found = []
    for is_eager in (False, True):
        with (
            caplog.at_level(logging.INFO),
            LLM(model=str(tmp_path), device="cpu", max_num_seqs=4, kv_cache_memory=0.02, enforce_eager=is_eager) as llm,
        ):
            for batch in (prompts, prompts[1:2]):
                found += [output.outputs[0] for output in llm.generate(batch, greedy)]
    assert not [record for record in caplog.records if "not recorded" in record.getMessage()]
    answers = [(list(answer.token_ids), answer.logprobs) for answer in found]
    assert answers[:4] == answers[4:]
    assert answers[1] == answers[3]
