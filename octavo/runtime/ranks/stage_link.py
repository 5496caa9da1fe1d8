"""How a rank computes its stage: it gets what the stage before has computed, and hands on what it has computed itself.

All stages then get the output of the last, and sample from it as ranks of one stage do: so tokens, log-probabilities
and pooled vectors are known to each, and a step needs no other way back.

Shapes: T rows of a step, R rows whose logits are needed, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.models.layer_cache import PipelineStage
from octavo.ops.attention.attention import PagedRows
from octavo.ops.device_backend import WAITS, WORKS, Check, MessageReader, RankMemory

StageForward = Callable[..., Tensor]
"""``CausalLM.forward`` over a stage's caches: token ids, positions, rows, and what the stage before has computed."""


class StageLink:
    """One rank's way to the same rank of the other stages."""

    def __init__(self, memory: RankMemory, check: Check, dtype: torch.dtype, width: int) -> None:
        """``check`` is called while waiting, and raises when waiting is in vain. ``dtype``, ``width``: those of the
        residual stream."""
        self.stage = PipelineStage(memory.stage, memory.num_stages)
        self._memory, self._dtype, self._width = memory, dtype, width
        self._writers = memory.to_stages(check)
        self._before = None if self.stage.is_first else memory.from_stage(self.stage.number - 1, check)
        self._last = None if self.stage.is_last else memory.from_stage(self.stage.count - 1, check)
        self._received = torch.empty(0, width, dtype=dtype)
        """Holds the last stage's output: at one address, so that what is computed from it can be recorded."""

    def may_wait(self, num_rows: int) -> bool:
        """Whether steps with so many rows of output may be finished later than they are begun.

        The channel must have room for the outputs of all steps in flight. Ranks of one stage would not agree when to
        finish which, and sampling needs all of them.
        """
        if self._memory.within.size > 1:
            return False
        return num_rows * self._width * self._dtype.itemsize * self.stage.count <= self._memory.channel_bytes // 2

    def begin(self, forward: StageForward, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        """Compute this stage and hand its output on, which is also returned."""
        given = [] if self._before is None else [self._next(self._before, self.stage.number - 1)]
        if self._last is not None:
            rows = replace(rows, logits_indices_R=None)
        x_TD = forward(token_ids_T, positions_T, rows, *given)
        content = x_TD.contiguous().view(torch.uint8).numpy().tobytes()
        for writer in self._writers:
            writer.write(content)
        return x_TD

    def finish(self, x_TD: Tensor) -> Tensor:
        """The last stage's output of the oldest step that was begun and not finished, given this stage's: [T, D], or
        [R, D] with logits indices; valid until the next call."""
        if self._last is None:
            return x_TD
        x = self._next(self._last, self.stage.count - 1)
        if len(self._received) < len(x):
            self._received = torch.empty_like(x)
        return self._received[: len(x)].copy_(x)

    def _next(self, reader: MessageReader, stage: int) -> Tensor:
        """The next output of this stage."""
        self._memory.note(WAITS + stage)
        content = reader.next()
        self._memory.note(WORKS)
        return torch.frombuffer(bytearray(content), dtype=self._dtype).view(-1, self._width)
