"""A forward pass on a CPU, recorded once for each number of rows and then replayed in compiled code.

For a few tokens, preparing a layer's kernel calls in Python takes longer than computing them. Short steps are therefore
recorded (``ops.cpu.calls``) over input buffers at fixed addresses, into which each step is copied. The buffers have
room for as many sequences as rows; unused sequences have no rows. Longer steps, and models that use operations other
than recordable kernels, run without recording.

Shapes: T tokens of the step, R rows whose logits are needed, S sequences, B entries of the widest block table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention import GroupRows, PagedRows
from octavo.ops.cpu.calls import Arena, Recording, recording
from octavo.ops.dispatch import is_wrapped
from octavo.runtime.drafter import Tap

logger = logging.getLogger(__name__)

MOST_ROWS = 64
"""Largest recorded step. Recordings take memory; above this, preparing calls is a small part of a step."""
LEAST_TABLE = 32

Compute = Callable[..., Tensor]
"""Takes token ids, positions, rows and other tensors [T, ...]; gives the last layer's output, [T, D] or [R, D]."""


class _Step(NamedTuple):
    """Input buffers at fixed addresses, the recorded calls over them, and their result."""

    inputs: list[Tensor]
    rows: PagedRows
    recording: Recording
    x_TD: Tensor
    tapped: list[tuple[Tap, Tensor]]
    """What layers keep for a drafter."""


class RecordedForward:
    """A faster forward pass; its result is valid until the next call."""

    def __init__(self, compute: Compute, layers: Sequence[Any] = ()) -> None:
        """``layers``: those of the model, which a drafter may tap."""
        self._compute = compute
        self._layers = layers
        self._arena = Arena()
        self._steps: dict[tuple[int, int], _Step] = {}
        self._is_recordable = True

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows, *others: Tensor) -> Tensor:
        """See ``Compute``."""
        if len(token_ids_T) > MOST_ROWS or not self._is_recordable or is_wrapped():
            return self._compute(token_ids_T, positions_T, rows, *others)
        x_TD = self._repeated([token_ids_T, positions_T, *others], rows)
        return x_TD if rows.logits_indices_R is None else x_TD[rows.logits_indices_R]

    def _repeated(self, inputs: list[Tensor], rows: PagedRows) -> Tensor:
        """The output of all rows, as recordings do not depend on logits indices."""
        width = max(LEAST_TABLE, 1 << (rows.groups[0].block_tables_SB.shape[1] - 1).bit_length())
        step = self._steps.get((len(inputs[0]), width))
        if step is None:
            return self._record(inputs, rows, width)
        for own, given in zip(step.inputs, inputs, strict=True):
            own.copy_(given)
        _fill(rows, step.rows)
        step.recording.repeat()
        for tap, kept_TD in step.tapped:
            tap.x_TD = kept_TD
        return step.x_TD

    def _record(self, given: list[Tensor], given_rows: PagedRows, width: int) -> Tensor:
        rows, inputs = _like(given_rows, width), [x.clone() for x in given]
        _fill(given_rows, rows)
        with recording(self._arena) as made:
            x_TD = self._compute(*inputs[:2], rows, *inputs[2:])
        if made.foreign:
            logger.info("steps are not recorded, the model uses %s", ", ".join(sorted(made.foreign)))
            self._is_recordable = False
            self._steps.clear()
        else:
            tapped = [(layer, layer.x_TD) for layer in self._layers if isinstance(layer, Tap)]
            self._steps[len(inputs[0]), width] = _Step(inputs, rows, made, x_TD, tapped)
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
