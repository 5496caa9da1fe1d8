"""A model's forward pass on a CPU, recorded once for each number of rows and then repeated in compiled code.

Preparing a layer's calls in Python takes longer than computing them for a few tokens. Short steps are therefore
recorded (``ops.cpu.calls``) over inputs that stay where they are, into which each step is copied. There is room for as
many sequences as rows; where there are fewer, the others have no rows. Longer steps, and models that use more than
kernels with recordable calls, run as they are written.

Shapes: T tokens of the step, R rows whose logits are needed, S sequences, B entries of the widest block table.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.models.registry import CausalLM
from octavo.ops.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.cpu.calls import Arena, Recording, recording
from octavo.ops.dispatch import is_wrapped

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""A recording takes memory; above this, preparing calls is a small part of a step."""
LEAST_TABLE = 32


class _Step(NamedTuple):
    """Inputs that stay in place, the calls over them, and the result."""

    token_ids_T: Tensor
    positions_T: Tensor
    rows: PagedRows
    recording: Recording
    x_TD: Tensor


class RecordedForward:
    """``model.forward``; what it returns is good until it is called again."""

    def __init__(self, model: CausalLM, caches: Sequence[LayerCache]) -> None:
        self._model = model
        self._caches = caches
        self._arena = Arena()
        self._steps: dict[tuple[int, int], _Step] = {}
        self._is_recordable = True

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        """The last layer's output, [T, D] or [R, D]; see ``CausalLM.forward``."""
        if len(token_ids_T) > MOST_ROWS or not self._is_recordable or is_wrapped():
            return self._forward(token_ids_T, positions_T, rows)
        x_TD = self._repeated(token_ids_T, positions_T, rows)
        return x_TD if rows.logits_indices_R is None else x_TD[rows.logits_indices_R]

    def _repeated(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        """The output of all rows: which of them are looked at may differ where all else is alike."""
        width = max(LEAST_TABLE, 1 << (rows.groups[0].block_tables_SB.shape[1] - 1).bit_length())
        step = self._steps.get((len(token_ids_T), width))
        if step is None:
            return self._record(token_ids_T, positions_T, rows, width)
        step.token_ids_T.copy_(token_ids_T)
        step.positions_T.copy_(positions_T)
        _fill(rows, step.rows)
        step.recording.repeat()
        return step.x_TD

    def _forward(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        return self._model.forward(token_ids_T, positions_T, self._caches, rows)

    def _record(self, token_ids_T: Tensor, positions_T: Tensor, given: PagedRows, width: int) -> Tensor:
        rows = _like(given, width)
        token_ids_T, positions_T = token_ids_T.clone(), positions_T.clone()
        _fill(given, rows)
        with recording(self._arena) as made:
            x_TD = self._forward(token_ids_T, positions_T, rows)
        if made.foreign:
            logger.info("steps are not recorded, the model uses %s", ", ".join(sorted(made.foreign)))
            self._is_recordable = False
            self._steps.clear()
        else:
            self._steps[len(token_ids_T), width] = _Step(token_ids_T, positions_T, rows, made, x_TD)
        return x_TD


def _like(rows: PagedRows, width: int) -> PagedRows:
    """Room for so many rows, of as many sequences, with tables of ``width`` entries."""
    T = len(rows.groups[0].slot_mapping_T)
    starts, lengths = torch.zeros(T + 1, dtype=torch.int32), torch.zeros(T, dtype=torch.int32)
    groups = [
        GroupRows(torch.empty_like(group.slot_mapping_T), torch.zeros(T, width, dtype=torch.int32))
        for group in rows.groups
    ]
    return PagedRows(tuple(groups), starts, lengths, T)


def _fill(given: PagedRows, rows: PagedRows) -> None:
    """Bring a step's inputs to where the calls read them; sequences behind those that there are begin where the rows
    end."""
    for given_group, group in zip(given.groups, rows.groups, strict=True):
        S, width = given_group.block_tables_SB.shape
        group.slot_mapping_T.copy_(given_group.slot_mapping_T)
        group.block_tables_SB[:S, :width].copy_(given_group.block_tables_SB)
    S = len(given.seq_lens_S)
    rows.cu_seqlens_q.fill_(len(given.groups[0].slot_mapping_T))[: S + 1].copy_(given.cu_seqlens_q)
    rows.seq_lens_S.zero_()[:S].copy_(given.seq_lens_S)
