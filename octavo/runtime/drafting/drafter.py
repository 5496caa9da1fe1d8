"""Speculative decoding on the executing side: models that draft the next tokens on the device, after each step.

Shapes: T rows, S sequences, R sampled rows, D model, K drafts of a sequence, B entries of a block table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo import ops
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import PagedRows
from octavo.ops.drafting import NewestTokens
from octavo.runtime.executors.sampling_state import SamplingState
from octavo.runtime.executors.step_views import StepTensors
from octavo.steps.graph_shapes import StepShape


class DraftInputs(NamedTuple):
    """What a drafter gets after a step has been sampled. Rows and sequences of padding are included."""

    token_ids_T: Tensor
    """int64"""
    positions_T: Tensor
    """int64"""
    next_tokens_T: Tensor
    """int64: the token behind each row: that of the next row, or the sampled one. Behind a rejected draft it is any."""
    hidden: Mapping[int, Tensor]
    """For each of the drafter's ``layers`` the residual stream [T, D] that enters it; the number of layers stands for
    the last layer's output, before the final norm."""
    rows: PagedRows
    """The step's sequences, and their block tables in every KV group."""
    last_rows_S: Tensor
    """int64: the row behind which the newest token of each sequence was sampled."""
    tables_GSB: Tensor
    """int32: the block tables of every group."""
    batch_indices_S: Tensor
    """int64"""
    capacities_S: Tensor
    """int32: positions that have a block in every KV group; what is drafted behind them cannot be stored."""


class Drafter(Protocol):
    """A model that drafts. It never synchronises with the host, and may be captured in a CUDA graph."""

    num_drafts: int
    """Most drafts of each sequence and step."""
    layers: tuple[int, ...]
    """Layers whose inputs it needs; see ``DraftInputs.hidden``."""

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        """Drafts, int32 [S, K]: tokens for the positions ``newest.positions_KS``, of K drafts at most.

        A drafter that samples must call ``ops.sample`` with ``newest.params_S`` at these positions: the target then
        draws with the same noise, so that drafts are accepted as often as the two distributions allow, whatever the
        temperature. For other rules than that of equal tokens the temperature is 0: they accept the most likely token
        most often.
        """
        ...

    def remember(self, inputs: DraftInputs) -> None:
        """Fill the drafter's cache for the rows of the step, as drafting does, but make no drafts."""
        ...


class Drafting:
    """Runs a drafter at the end of each step, and keeps its drafts for the next one."""

    def __init__(self, model: CausalLM, drafter: Drafter, state: SamplingState, is_greedy: bool = False) -> None:
        """``is_greedy``: the most likely tokens are drafted, whatever the temperature of a request."""
        self._drafter = drafter
        self._is_greedy = is_greedy
        self._state = state
        self._taps = tap_layers(model, drafter.layers)
        self.needs_output = None in self._taps.values()
        """Whether the drafter needs the last layer's output, for all rows."""

    def __call__(
        self, step: StepTensors, shape: StepShape, tokens_R: Tensor, num_accepted_S: Tensor | None, x_TD: Tensor
    ) -> Tensor | None:
        """The drafts [S, K] behind the sampled tokens, if the step makes any; ``x`` is the last layer's output, for
        all rows if it is needed."""
        assert step.capacities_S is not None
        assert step.next_tokens_S is not None
        rows, vocab_size = step.rows, self._state.vocab_size
        behind = ops.next_tokens(
            step.token_ids_T,
            rows.cu_seqlens_q,
            step.cu_samples,
            num_accepted_S,
            tokens_R,
            step.next_tokens_S,
            vocab_size,
        )
        kept = {layer: x_TD if tap is None else tap.x_TD for layer, tap in self._taps.items()}
        inputs = DraftInputs(
            step.token_ids_T,
            step.positions_T,
            behind.tokens_T,
            kept,
            rows,
            behind.last_rows_S,
            step.tables_GSB,
            step.batch_indices_S,
            step.capacities_S,
        )
        if not shape.num_proposed:
            self._drafter.remember(inputs)
            return None
        num_drafts = min(shape.num_proposed, self._drafter.num_drafts)
        last_samples_S = behind.last_samples_S
        newest = ops.newest_tokens(tokens_R, step.params, last_samples_S, num_drafts, vocab_size, self._is_greedy)
        drafts_SK = self._drafter(inputs, newest)
        assert self._state.drafts_CK is not None
        self._state.drafts_CK[step.batch_indices_S, :num_drafts] = drafts_SK
        return drafts_SK


class Tap(threading.local):
    """A layer that keeps its input, which it may overwrite. Each thread has its own, as kernels are compiled in one of
    their own by steps that nobody asked for."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.x_TD = torch.empty(0)

    def __call__(self, x_TD: Tensor, *args: Any) -> Tensor:
        self.x_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        ops.put_columns(x_TD, self.x_TD, 0)  # which can be recorded, other than a copy
        result: Tensor = self._layer(x_TD, *args)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def tap_layers(model: Any, layers: Iterable[int]) -> dict[int, Tap | None]:
    """Make these layers of a model keep their inputs; ``None`` stands for the model's output."""
    taps: dict[int, Tap | None] = {}
    for layer in layers:
        taps[layer] = None
        if layer < len(model.layers):
            whole = model.layers[layer]
            taps[layer] = model.layers[layer] = whole if isinstance(whole, Tap) else Tap(whole)
    return taps
