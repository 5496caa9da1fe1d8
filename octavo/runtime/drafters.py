"""The drafters: models and heads that draft one token after the other, and blocks that are drafted in one pass.

Shapes: T rows, S sequences, K drafts of a sequence, D model, V vocabulary, N = K + 1 rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.drafters.dflash import DFlashModel
from octavo.models.drafters.head import DraftHead, spread
from octavo.models.registry import CausalLM
from octavo.ops.attention import LayerCache, PagedRows
from octavo.runtime.draft_rows import block_rows, drawn, rows_behind
from octavo.runtime.drafter import DraftInputs, Newest
from octavo.runtime.step_program import Forward


class HeadDrafter:
    """Drafts with a head over the model's hidden states, such as EAGLE-3 or an MTP layer."""

    def __init__(self, head: DraftHead, caches: Sequence[LayerCache], block_size: int, num_drafts: int) -> None:
        self.layers = head.layers
        self.num_drafts = num_drafts
        self._head, self._caches, self._block_size = head, caches, block_size

    def __call__(self, inputs: DraftInputs, newest: Newest) -> Tensor:
        head, caches = self._head, self._caches
        positions_S = inputs.positions_T[inputs.last_rows_S]
        rows = replace(inputs.rows, logits_indices_R=inputs.last_rows_S)
        x_SD = head.forward(inputs.next_tokens_T, head.combine(inputs.hidden), inputs.positions_T, caches, rows)
        drafts = [drawn(head.logits(x_SD), newest.params_S, 1)]
        for later_S, its_rows in rows_behind(inputs, positions_S, self.num_drafts - 1, self._block_size):
            x_SD = head.forward(drafts[-1], head.feedback(x_SD), later_S, caches, its_rows)
            drafts.append(drawn(head.logits(x_SD), newest.params_S, len(drafts) + 1))
        return torch.stack(drafts, dim=1).int()

    def remember(self, inputs: DraftInputs) -> None:
        """See ``Drafter``."""
        hidden_TD = self._head.combine(inputs.hidden)
        self._head.remember(inputs.next_tokens_T, hidden_TD, inputs.positions_T, self._caches, inputs.rows)


class ModelDrafter:
    """Drafts with a smaller model of the same vocabulary."""

    layers: tuple[int, ...] = ()

    def __init__(
        self, model: CausalLM, config: ModelConfig, forward: Forward, block_size: int, num_drafts: int, vocab_size: int
    ) -> None:
        """``config`` is that of the drafter, ``vocab_size`` that of the model that is drafted for."""
        self.num_drafts = num_drafts
        self._model, self._forward = model, forward
        self._block_size, self._vocab_size = block_size, vocab_size
        self._last_token, self._last_position = config.vocab_size - 1, config.max_position_embeddings - 1

    def __call__(self, inputs: DraftInputs, newest: Newest) -> Tensor:
        self.remember(inputs)
        tokens_S, drafts = newest.tokens_S, list[Tensor]()
        positions_S = inputs.positions_T[inputs.last_rows_S]
        for later_S, rows in rows_behind(inputs, positions_S, self.num_drafts, self._block_size):
            logits_SV = spread(self._model.logits(self._run(tokens_S, later_S, rows)), None, self._vocab_size)
            tokens_S = drawn(logits_SV, newest.params_S, len(drafts) + 1)
            drafts.append(tokens_S)
        return torch.stack(drafts, dim=1).int()

    def remember(self, inputs: DraftInputs) -> None:
        """See ``Drafter``."""
        rows = replace(inputs.rows, logits_indices_R=inputs.last_rows_S)
        self._run(inputs.token_ids_T, inputs.positions_T, rows)

    def _run(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        """The output; what is beyond the drafter's vocabulary or context only gives drafts that are wrong."""
        return self._forward(token_ids_T.clamp(max=self._last_token), positions_T.clamp(max=self._last_position), rows)


class BlockDrafter:
    """Drafts all tokens in one pass over masks (DFlash)."""

    def __init__(self, model: DFlashModel, caches: Sequence[LayerCache], block_size: int, num_drafts: int) -> None:
        self.layers = model.layers
        self.num_drafts = num_drafts
        self._model, self._caches, self._block_size = model, caches, block_size

    def __call__(self, inputs: DraftInputs, newest: Newest) -> Tensor:
        model, S, K = self._model, len(newest.tokens_S), self.num_drafts
        device = newest.tokens_S.device
        self.remember(inputs)
        ahead_N = torch.arange(K + 1, device=device)
        positions_SN = (inputs.positions_T[inputs.last_rows_S] + 1).unsqueeze(1) + ahead_N
        tokens_SN = torch.full((S, K + 1), model.mask_token_id, dtype=torch.int64, device=device)
        tokens_SN[:, 0] = newest.tokens_S
        masks_R = (torch.arange(S, device=device).unsqueeze(1) * (K + 1) + ahead_N[1:]).flatten()
        rows = block_rows(inputs, positions_SN, masks_R, self._block_size)
        x_RD = model.forward(tokens_SN.flatten(), positions_SN.flatten(), self._caches, rows)
        params_R = type(newest.params_S)(*(column.repeat_interleave(K) for column in newest.params_S))
        ahead_R = ahead_N[1:].int().repeat(S)
        return drawn(model.logits(x_RD), params_R, ahead_R).view(S, K).int()

    def remember(self, inputs: DraftInputs) -> None:
        """See ``Drafter``."""
        self._model.remember(inputs.hidden, inputs.positions_T, self._caches, inputs.rows)
