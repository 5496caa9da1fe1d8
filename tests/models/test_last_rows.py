"""The last layer computes no row that nobody wants, and those that are wanted as it does among all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.kv_storage import KVStorage, StatePool
from octavo.weights.checkpoint import open_checkpoint
from tests.models.families import FIRST_ROWS, VOCAB_SIZE, make_checkpoint
from tests.tiers import one_in

LENGTHS = (9, 1, 23)
T = sum(LENGTHS)
BLOCK = 32


@one_in(5)
@pytest.mark.parametrize("row", FIRST_ROWS)
def test_wanted_rows_come_out_as_among_all(row: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_checkpoint(tmp_path, row)
    checkpoint, cpu = open_checkpoint(tmp_path), torch.device("cpu")
    config: Any = read_config(checkpoint.config)
    model = load_model(config, checkpoint, WeightFormat(torch.float32, cpu)).model
    tokens = torch.randint(VOCAB_SIZE, (T,))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    ends = torch.tensor(LENGTHS).cumsum(0)
    slots = positions + torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)) * BLOCK
    tables = torch.arange(len(LENGTHS), dtype=torch.int32)[:, None]
    lengths = torch.tensor([0, *ends.tolist()], dtype=torch.int32), torch.tensor(LENGTHS, dtype=torch.int32)
    state_slots = torch.arange(len(LENGTHS), dtype=torch.int32)
    rows = PagedRows((GroupRows(slots, tables),), *lengths, max(LENGTHS), state_slots_S=state_slots)

    def forward(indices_R: torch.Tensor | None) -> torch.Tensor:
        sizes, states = ([len(LENGTHS)], BLOCK, torch.float32, cpu), StatePool(len(LENGTHS))
        storage = KVStorage(config.cache, kv_groups(config.cache), *sizes, states=states)
        return model.forward(tokens, positions, storage.layers, replace(rows, logits_indices_R=indices_R))

    every = forward(None)
    assert every.shape == (T, config.hidden_size)
    for wanted in (ends - 1, torch.tensor([T - 1, 0]), torch.tensor([], dtype=torch.int64)):
        found = forward(wanted)
        assert found.shape == (len(wanted), config.hidden_size)
        torch.testing.assert_close(found, every[wanted], atol=1e-5, rtol=1e-5)
