"""A model's forward pass on a CPU, recorded once for each number of rows and then replayed in compiled code.

For a few tokens, preparing a layer's kernel calls in Python takes longer than computing them. Short steps are therefore
recorded (``ops.cpu.calls``) over input buffers at fixed addresses, into which each step is copied. The buffers have
room for as many sequences as rows; unused sequences have no rows. Longer steps, and models that use operations other
than recordable kernels, run without recording.

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
from octavo.runtime.drafter import Tap

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""Largest recorded step. Recordings take memory; above this, preparing calls is a small part of a step."""
LEAST_TABLE = 32


class _Step(NamedTuple):
    """Input buffers at fixed addresses, the recorded calls over them, and their result."""

    token_ids_T: Tensor
    positions_T: Tensor
    rows: PagedRows
    recording: Recording
    x_TD: Tensor
    tapped: list[tuple[Tap, Tensor]]
    """What layers keep for a drafter."""


class RecordedForward:
    """A faster ``model.forward``; its result is valid until the next call."""

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
        """The output of all rows, as recordings do not depend on logits indices."""
        width = max(LEAST_TABLE, 1 << (rows.groups[0].block_tables_SB.shape[1] - 1).bit_length())
        step = self._steps.get((len(token_ids_T), width))
        if step is None:
            return self._record(token_ids_T, positions_T, rows, width)
        step.token_ids_T.copy_(token_ids_T)
        step.positions_T.copy_(positions_T)
        _fill(rows, step.rows)
        step.recording.repeat()
        for tap, kept_TD in step.tapped:
            tap.x_TD = kept_TD
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
            tapped = [(layer, layer.x_TD) for layer in getattr(self._model, "layers", ()) if isinstance(layer, Tap)]
            self._steps[len(token_ids_T), width] = _Step(token_ids_T, positions_T, rows, made, x_TD, tapped)
        return x_TD


def _like(rows: PagedRows, width: int) -> PagedRows:
    """Buffers for as many rows as ``rows`` has, as many sequences, and block tables of ``width`` entries."""
    T = len(rows.groups[0].slot_mapping_T)
    starts, lengths = torch.zeros(T + 1, dtype=torch.int32), torch.zeros(T, dtype=torch.int32)
    groups = [
        GroupRows(torch.empty_like(group.slot_mapping_T), torch.zeros(T, width, dtype=torch.int32))
        for group in rows.groups
    ]
    return PagedRows(tuple(groups), starts, lengths, T)


def _fill(given: PagedRows, rows: PagedRows) -> None:
    """Copy a step's inputs to the buffers that the calls read; unused sequences start at the end of the rows."""
    for given_group, group in zip(given.groups, rows.groups, strict=True):
        S, width = given_group.block_tables_SB.shape
        group.slot_mapping_T.copy_(given_group.slot_mapping_T)
        group.block_tables_SB[:S, :width].copy_(given_group.block_tables_SB)
    S = len(given.seq_lens_S)
    rows.cu_seqlens_q.fill_(len(given.groups[0].slot_mapping_T))[: S + 1].copy_(given.cu_seqlens_q)
    rows.seq_lens_S.zero_()[:S].copy_(given.seq_lens_S)
