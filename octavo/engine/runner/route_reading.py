"""Reads which experts a mixture used for a sequence when it ends, without a wait for the step that runs meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.model_info import RoutesInfo
from octavo.types import Output, Sequence

ReadRoutes = Callable[[list[int]], Callable[[], bytes]]
"""Starts to read the positions of blocks; what it returns waits for their content."""


def as_array(routes: bytes, info: RoutesInfo) -> npt.NDArray[Any]:
    """The experts in ``Output.routes``: [positions, L, S]."""
    dtype = np.uint8 if info.itemsize == 1 else np.uint16
    return np.frombuffer(routes, dtype).reshape(-1, info.num_layers, info.num_chosen)


class _Reading(NamedTuple):
    output: Output
    wait: Callable[[], bytes]
    first: int
    """Place of the first position in the content, in bytes."""
    end: int


class RouteReading:
    """Holds the last outputs of sequences back by a step, at the end of which the copy of their experts is done."""

    def __init__(self, read: ReadRoutes, info: RoutesInfo, block_size: int) -> None:
        self.info = info
        self._read, self._block_size, self._num_bytes = read, block_size, info.num_bytes
        self._held: list[_Reading] = []
        self._begun: list[_Reading] = []

    def __bool__(self) -> bool:
        """Whether outputs are held back."""
        return bool(self._held)

    def begin(self, seq: Sequence, output: Output) -> None:
        """Start to read for a sequence that ends with this output, while it has its blocks."""
        end = len(seq.tokens) - seq.tokens.count(None)
        if end > seq.num_prompt_tokens:
            end -= 1  # the last token was sampled, and not computed
        start = min(seq.request.params.routed_experts_prompt_start, end)
        first_block = start // self._block_size
        blocks = seq.groups[0].block_table[first_block : -(-end // self._block_size)]
        begin = first_block * self._block_size
        places = ((position - begin) * self._num_bytes for position in (start, end))
        self._begun.append(_Reading(output, self._read(blocks) if blocks else bytes, *places))

    def added(self, outputs: list[Output], *, waits: bool) -> list[Output]:
        """``outputs`` without those whose reading has just begun, and with the ones before; with ``waits``, all."""
        begun, self._begun = self._begun, []
        if not begun and not self._held:
            return outputs
        ready, self._held = (self._held + begun, []) if waits else (self._held, begun)
        late = {id(reading.output) for reading in begun}
        for output, wait, first, end in ready:
            output.routes = bytes(wait()[first:end])  # of pinned memory, which is used again
        return [output for output in outputs if id(output) not in late] + [reading.output for reading in ready]
