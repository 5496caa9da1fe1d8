"""A forward pass on a CPU, recorded once for each number of rows and then replayed in compiled code.

For a few tokens, preparing a layer's kernel calls in Python takes longer than computing them. Steps are therefore
recorded (``DeviceBackend.recorder``) over input buffers at fixed addresses, into which each step is copied. They have
room for more sequences than most steps have; those that are not used have no rows. With many threads this is so for
longer steps too: they are recorded when two in a row have the same form, as chunks of prompts do. Logits are replayed
while steps have as many rows. Models that use operations other than recordable kernels run without recording.

Shapes: T tokens of the step, R rows whose logits are needed, S sequences, B entries of the widest block table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.ops.device_backend import Recorder, Recording
from octavo.ops.dispatch import is_wrapped
from octavo.runtime.drafting.drafter import Tap

logger = logging.getLogger(__name__)

SHORT = 64
"""Most rows of a step that is recorded at once. It computes all rows of the last layer, whichever need logits."""
LONGEST = 2048
"""Recordings take memory; above this, preparing calls is a small part of a step on any machine."""
MOST_LONG = 4
LEAST_TABLE = 32

Compute = Callable[..., Tensor]
"""Takes token ids, positions, rows and other tensors [T, ...]; gives the last layer's output, [T, D] or [R, D]."""


class _Form(NamedTuple):
    """What steps have in common that can use one recording."""

    T: int
    width: int
    """Entries of a block table."""
    room: int
    """Sequences that the buffers have room for."""
    num_logits: int
    """Rows of the result; 0: all."""
    has_marks: bool
    """Whether recurrent states are kept within chunks."""


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

    def __init__(
        self, compute: Compute, record: Recorder, layers: Sequence[Any] = (), has_states: bool = False
    ) -> None:
        """``layers``: those of the model, which a drafter may tap; ``has_states``: some have recurrent state."""
        self._compute = compute
        self._has_states = has_states
        self._layers = layers
        self._record_calls = record
        self._steps: dict[_Form, _Step] = {}
        self._last: _Form | None = None
        self._is_recordable = True

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows, *others: Tensor) -> Tensor:
        """See ``Compute``."""
        if len(token_ids_T) > LONGEST or not self._is_recordable or is_wrapped() or rows.images is not None:
            return self._compute(token_ids_T, positions_T, rows, *others)
        form, inputs = _form(rows, len(token_ids_T)), [token_ids_T, positions_T, *others]
        if form not in self._steps and form.T > SHORT and form != self._last:
            self._last = form
            return self._compute(token_ids_T, positions_T, rows, *others)
        x_TD = self._repeated(inputs, rows, form)
        if rows.logits_indices_R is None:
            return x_TD
        return x_TD[: len(rows.logits_indices_R)] if form.num_logits else x_TD[rows.logits_indices_R]

    def _repeated(self, inputs: list[Tensor], rows: PagedRows, form: _Form) -> Tensor:
        """The output of all rows of the recording."""
        step = self._steps.get(form)
        if step is None:
            return self._record(inputs, rows, form)
        for own, given in zip(step.inputs, inputs, strict=True):
            own.copy_(given)
        _fill(rows, step.rows)
        step.recording.repeat()
        for tap, kept_TD in step.tapped:
            tap.x_TD = kept_TD
        return step.x_TD

    def _record(self, given: list[Tensor], given_rows: PagedRows, form: _Form) -> Tensor:
        rows, inputs = _like(given_rows, form, self._has_states), [x.clone() for x in given]
        _fill(given_rows, rows)
        with self._record_calls() as made:
            x_TD = self._compute(*inputs[:2], rows, *inputs[2:])
        if made.foreign:
            logger.info("steps are not recorded, the model uses %s", ", ".join(sorted(made.foreign)))
            self._is_recordable = False
            self._steps.clear()
        else:
            long = [other for other in self._steps if other.T > SHORT]
            if form.T > SHORT and len(long) == MOST_LONG:
                del self._steps[long[0]]
            tapped = [(layer, layer.x_TD) for layer in self._layers if isinstance(layer, Tap)]
            self._steps[form] = _Step(inputs, rows, made, x_TD, tapped)
        return x_TD


class RecordedCall:
    """A function of one tensor, replayed while it is called with the same memory: decode steps of as many sequences.

    Only the last recording is kept, with its result, which is valid until the next call.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], record: Recorder) -> None:
        self._compute = compute
        self._record_calls = record
        self._memory: tuple[int, torch.Size, tuple[int, ...]] | None = None
        self._made: tuple[Recording, Tensor] | None = None
        self._is_recordable = True

    def __call__(self, x: Tensor) -> Tensor:
        """What ``compute`` returns. It is recorded at the second call in a row with this memory."""
        if not self._is_recordable or is_wrapped():
            return self._compute(x)
        memory = x.data_ptr(), x.shape, x.stride()
        if memory != self._memory:
            self._memory, self._made = memory, None
            return self._compute(x)
        if self._made is not None:
            self._made[0].repeat()
            return self._made[1]
        with self._record_calls() as made:
            result = self._compute(x)
        self._is_recordable = not made.foreign
        self._made = (made, result) if self._is_recordable else None
        return result


def _form(rows: PagedRows, T: int) -> _Form:
    (S, width), has_marks = rows.groups[0].block_tables_SB.shape, rows.state_marks_T is not None
    width = max(LEAST_TABLE, _at_least(width))
    if T <= SHORT:
        return _Form(T, width, T, 0, has_marks)
    num_logits = 0 if rows.logits_indices_R is None else _at_least(len(rows.logits_indices_R))
    return _Form(T, width, _at_least(S), num_logits, has_marks)


def _at_least(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _like(rows: PagedRows, form: _Form, has_states: bool) -> PagedRows:
    """Buffers for steps of a form."""
    T, room = form.T, form.room
    starts, lengths = torch.zeros(room + 1, dtype=torch.int32), torch.zeros(room, dtype=torch.int32)
    groups = [
        GroupRows(torch.empty_like(group.slot_mapping_T), torch.zeros(room, form.width, dtype=torch.int32))
        for group in rows.groups
    ]
    indices = torch.zeros(form.num_logits, dtype=torch.int64) if form.num_logits else None
    shifts = None if rows.rope_shifts_AT is None else torch.empty_like(rows.rope_shifts_AT)
    slots = torch.full((room,), -1, dtype=torch.int32) if has_states else None
    made = PagedRows(tuple(groups), starts, lengths, T, indices, rope_shifts_AT=shifts, state_slots_S=slots)
    return replace(made, state_marks_T=torch.empty(T, dtype=torch.int32)) if form.has_marks else made


def _fill(given: PagedRows, rows: PagedRows) -> None:
    """Copy a step's inputs to the buffers that the calls read; unused sequences start at the end of the rows."""
    for given_group, group in zip(given.groups, rows.groups, strict=True):
        S, width = given_group.block_tables_SB.shape
        group.slot_mapping_T.copy_(given_group.slot_mapping_T)
        group.block_tables_SB[:S, :width].copy_(given_group.block_tables_SB)
    S = len(given.seq_lens_S)
    rows.cu_seqlens_q.fill_(len(given.groups[0].slot_mapping_T))[: S + 1].copy_(given.cu_seqlens_q)
    rows.seq_lens_S.zero_()[:S].copy_(given.seq_lens_S)
    if given.rope_shifts_AT is not None and rows.rope_shifts_AT is not None:
        rows.rope_shifts_AT.copy_(given.rope_shifts_AT)
    if given.state_slots_S is not None and rows.state_slots_S is not None:
        rows.state_slots_S.fill_(-1)[:S].copy_(given.state_slots_S)
    if given.state_marks_T is not None and rows.state_marks_T is not None:
        rows.state_marks_T.copy_(given.state_marks_T)
    if given.logits_indices_R is not None and rows.logits_indices_R is not None:
        rows.logits_indices_R.zero_()[: len(given.logits_indices_R)].copy_(given.logits_indices_R)
