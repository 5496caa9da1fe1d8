"""Linear maps to which LoRA adapters are applied for some rows of a step, where adapter numbers stay on the device.

An adapter's number is its index in preallocated stacks, so that captured graphs also serve adapters loaded later.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.lora import AdaptedLinear, AdapterRows
from octavo.layers.norm import RMSNorm
from octavo.ops.linear.linear import Activation, LowRank, LowRankStack, compose
from octavo.quant.stored.stored_weight import LinearWeight


class StackedRows(AdapterRows):
    """The adapter of each row of the current step; ``max_rank`` is the rank allocated in every stack."""

    def __init__(self, max_adapters: int, max_rank: int) -> None:
        super().__init__()
        self.max_adapters = max_adapters
        self.max_rank: int = max_rank
        self._of_thread = threading.local()
        """Holds ``adapters_T`` per thread: while one thread runs steps, another may compile kernels."""

    def make_linear(self, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> StackedLinear:
        """See ``AdapterRows``."""
        return StackedLinear(self, weights, bias_N)

    @contextlib.contextmanager
    def of_rows(self, adapters_T: Tensor) -> Iterator[None]:
        """See ``AdapterRows``; kernels read the numbers when they run."""
        self._of_thread.adapters_T = adapters_T
        try:
            yield
        finally:
            self._of_thread.adapters_T = None

    @property
    def adapters_T(self) -> Tensor | None:
        """The adapter number of each row of the step, ``None`` for steps without adapters."""
        given_T: Tensor | None = getattr(self._of_thread, "adapters_T", None)
        return given_T


class StackedLinear(AdaptedLinear):
    """A linear map with a stack of low-rank updates; in a step without adapters it is the same as ``Linear``."""

    def __init__(self, rows: StackedRows, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> None:
        super().__init__(rows, weights, bias_N)
        self._stacked_rows = rows
        self._stack: LowRankStack | None = None

    def make_room(self, parts: Sequence[tuple[int, int]], num_inputs: int, like: Tensor) -> int:
        """Allocate the stack with the dtype and device of ``like`` and return its bytes.

        ``parts`` are (start, size) of each fused part of the outputs.
        """
        places, rank = self._stacked_rows.max_adapters, self._stacked_rows.max_rank
        self._stack = LowRankStack(
            like.new_zeros(places, len(parts), rank, num_inputs),
            like.new_zeros(places, max(start + size for start, size in parts), rank),
            torch.tensor(parts, dtype=torch.int32, device=like.device),
            max(size for _, size in parts),
        )
        return self._stack.down_APRK.nbytes + self._stack.up_ANR.nbytes

    def add(self, number: int, change: LowRank) -> None:
        """See ``AdaptedLinear``."""
        assert self._stack is not None, "make_room was not called for this linear map"
        rank = len(change.down_RK)
        part = self._stack.parts_P2[:, 0].tolist().index(change.start)
        self._stack.down_APRK[number, part, :rank].copy_(change.down_RK)
        self._stack.up_ANR[number, change.start : change.start + len(change.up_NR), :rank].copy_(change.up_NR)

    def remove(self, number: int) -> None:
        """See ``AdaptedLinear``. Steps still running may or may not use it; their results are discarded."""
        if self._stack is not None:
            self._stack.down_APRK[number].zero_()
            self._stack.up_ANR[number].zero_()

    def __call__(
        self,
        x_TK: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """See ``Linear``. Without an activation, the residual is added before the low-rank update."""
        stack, adapters_T = self._stack, self._stacked_rows.adapters_T
        if stack is None or adapters_T is None:
            return Linear.__call__(self, x_TK, norm=norm, residual=residual, activation=activation)
        inner, outer = (residual, None) if activation is None else (None, residual)

        def multiply(h_TK: Tensor) -> Tensor:
            y_TN = Linear.__call__(self, h_TK, residual=inner)
            return ops.stacked_lora(y_TN, h_TK, adapters_T, stack)

        return compose(x_TK, self.fused(norm, outer, activation), multiply)
