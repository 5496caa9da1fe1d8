"""The drafters: models and heads that draft one token after the other, and blocks that are drafted in one pass.

Shapes: T rows, S sequences, K drafts of a sequence, D model, V vocabulary, N = K + 1 rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from octavo import ops
from octavo.models.drafters.dflash import DFlashModel
from octavo.models.drafters.head import DraftHead
from octavo.models.model_config import ModelConfig
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.drafting import NewestTokens
from octavo.ops.sampling.sampling import SampleParams
from octavo.runtime.drafting.drafter import DraftInputs
from octavo.runtime.executors.forward import recorded
from octavo.runtime.executors.step_program import Forward
from octavo.runtime.kv_storage import KVStorage

WholeLogits = Callable[[Tensor], Tensor]
"""Logits of a drafter's whole vocabulary, from those of this rank's part. All ranks draw from these, the same."""


class HeadDrafter:
    """Drafts with a head over the model's hidden states, such as EAGLE-3 or an MTP layer."""

    def __init__(
        self,
        head: DraftHead,
        storage: KVStorage,
        num_drafts: int,
        vocab_size: int,
        whole: WholeLogits,
        enforce_eager: bool = False,
    ) -> None:
        """``vocab_size``: that of the model. On a CPU, kernel calls are recorded unless ``enforce_eager`` is set."""
        self.layers = head.layers
        self.num_drafts = num_drafts
        self._head, self._caches, self._block_size = head, storage.draft_layers, storage.block_size
        self._vocab_size, self._whole = vocab_size, whole
        self._first = recorded(self._behind_step, storage.device, enforce_eager)
        self._later = recorded(self._behind_drafts, storage.device, enforce_eager)
        self._remember = recorded(self._fill_cache, storage.device, enforce_eager)

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        head, draws = self._head, Draws(newest, self._vocab_size)
        rows = replace(inputs.rows, logits_indices_R=inputs.last_rows_S)
        hidden = [inputs.hidden[layer] for layer in self.layers]
        x_SD = self._first(inputs.next_tokens_T, inputs.positions_T, rows, *hidden)
        tokens_S = draws.draw(self._whole(head.logits(x_SD)), head.target_ids)
        for positions_S, its_rows in rows_behind(inputs, len(newest.positions_KS) - 1, self._block_size):
            x_SD = self._later(tokens_S, positions_S, its_rows, x_SD)
            tokens_S = draws.draw(self._whole(head.logits(x_SD)), head.target_ids)
        return draws.drafts_SK

    def remember(self, inputs: DraftInputs) -> None:
        """See ``Drafter``."""
        hidden = [inputs.hidden[layer] for layer in self.layers]
        self._remember(inputs.next_tokens_T, inputs.positions_T, inputs.rows, *hidden)

    def _behind_step(self, tokens_T: Tensor, positions_T: Tensor, rows: PagedRows, *hidden: Tensor) -> Tensor:
        x_TD = self._head.combine(dict(zip(self.layers, hidden, strict=True)))
        return self._head.forward(tokens_T, x_TD, positions_T, self._caches, rows)

    def _behind_drafts(self, tokens_S: Tensor, positions_S: Tensor, rows: PagedRows, x_SD: Tensor) -> Tensor:
        return self._head.forward(tokens_S, self._head.feedback(x_SD), positions_S, self._caches, rows)

    def _fill_cache(self, tokens_T: Tensor, positions_T: Tensor, rows: PagedRows, *hidden: Tensor) -> Tensor:
        x_TD = self._head.combine(dict(zip(self.layers, hidden, strict=True)))
        self._head.remember(tokens_T, x_TD, positions_T, self._caches, rows)
        return x_TD


class ModelDrafter:
    """Drafts with a smaller model of the same vocabulary."""

    layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        forward: Forward,
        block_size: int,
        num_drafts: int,
        vocab_size: int,
        whole: WholeLogits,
    ) -> None:
        """``config`` is that of the drafter, ``vocab_size`` that of the model that is drafted for."""
        self.num_drafts = num_drafts
        self._model, self._forward, self._whole = model, forward, whole
        self._block_size, self._vocab_size = block_size, vocab_size
        self._last_token, self._last_position = config.vocab_size - 1, config.max_position_embeddings - 1

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        self.remember(inputs)
        tokens_S, draws = newest.tokens_S, Draws(newest, self._vocab_size)
        for later_S, rows in rows_behind(inputs, len(newest.positions_KS), self._block_size):
            tokens_S = draws.draw(self._whole(self._model.logits(self._run(tokens_S, later_S, rows))))
        return draws.drafts_SK

    def remember(self, inputs: DraftInputs) -> None:
        """See ``Drafter``."""
        rows = replace(inputs.rows, logits_indices_R=inputs.last_rows_S)
        self._run(inputs.token_ids_T, inputs.positions_T, rows)

    def _run(self, token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows) -> Tensor:
        """The output; what is beyond the drafter's vocabulary or context only gives drafts that are wrong."""
        return self._forward(token_ids_T.clamp(max=self._last_token), positions_T.clamp(max=self._last_position), rows)


class BlockDrafter:
    """Drafts all tokens in one pass over masks (DFlash)."""

    def __init__(
        self, model: DFlashModel, caches: Sequence[LayerCache], block_size: int, num_drafts: int, whole: WholeLogits
    ) -> None:
        self.layers = model.layers
        self.num_drafts = num_drafts
        self._model, self._caches, self._block_size, self._whole = model, caches, block_size, whole

    def __call__(self, inputs: DraftInputs, newest: NewestTokens) -> Tensor:
        model, S, K = self._model, len(newest.tokens_S), self.num_drafts
        device = newest.tokens_S.device
        self.remember(inputs)
        ahead_N = torch.arange(K + 1, device=device)
        positions_SN = (inputs.positions_T[inputs.last_rows_S] + 1).unsqueeze(1) + ahead_N
        tokens_SN = torch.full((S, K + 1), model.mask_token_id, dtype=torch.int64, device=device)
        tokens_SN[:, 0] = newest.tokens_S
        num_drawn = len(newest.positions_KS)
        masks_R = (torch.arange(S, device=device).unsqueeze(1) * (K + 1) + ahead_N[1 : num_drawn + 1]).flatten()
        rows = block_rows(inputs, positions_SN, masks_R, self._block_size)
        x_RD = model.forward(tokens_SN.flatten(), positions_SN.flatten(), self._caches, rows)
        params_R = SampleParams(*(column.repeat_interleave(num_drawn) for column in newest.params_S))
        params_R = params_R._replace(position=newest.positions_KS.t().flatten())
        return ops.sample(self._whole(model.logits(x_RD)), params_R).clamp(min=0).view(S, num_drawn)

    def remember(self, inputs: DraftInputs) -> None:
        """See ``Drafter``."""
        self._model.remember(inputs.hidden, inputs.positions_T, self._caches, inputs.rows)


def rows_behind(inputs: DraftInputs, num_passes: int, block_size: int) -> list[tuple[Tensor, PagedRows]]:
    """For each pass its positions, behind those of the newest tokens, and one row for each sequence there."""
    if not num_passes:
        return []
    found = ops.draft_rows(
        inputs.positions_T, inputs.last_rows_S, inputs.capacities_S, inputs.tables_GSB, num_passes, block_size
    )
    passes = []
    for i in range(num_passes):
        slots_GS = found.slots_GPS[:, i].unbind()
        groups = [
            GroupRows(slots_S, group.block_tables_SB)
            for slots_S, group in zip(slots_GS, inputs.rows.groups, strict=True)
        ]
        rows = PagedRows(tuple(groups), found.cu_seqlens_q, found.seq_lens_PS[i], 1)
        passes.append((found.positions_PS[i], rows))
    return passes


def block_rows(inputs: DraftInputs, positions_SN: Tensor, needed_R: Tensor, block_size: int) -> PagedRows:
    """N rows behind each sequence that all attend to each other: each is a sequence whose length reaches to the last.

    ``needed_R``: the rows whose output is needed.
    """
    N = positions_SN.shape[1]
    capacities_S = inputs.capacities_S
    groups = []
    for group in inputs.rows.groups:
        slots_NS = _slots(group.block_tables_SB, positions_SN.t(), capacities_S, block_size)
        groups.append(GroupRows(slots_NS.t().flatten(), group.block_tables_SB.repeat_interleave(N, dim=0)))
    lengths_S = torch.minimum(positions_SN[:, -1] + 1, capacities_S).int()
    # The bound of two rows forbids kernels that store the keys of a sequence's only row while others are attending.
    starts = _starts(capacities_S.repeat_interleave(N))
    return PagedRows(tuple(groups), starts, lengths_S.repeat_interleave(N), 2, needed_R)


def _slots(tables_SB: Tensor, positions_PS: Tensor, capacities_S: Tensor, block_size: int) -> Tensor:
    """The slots, int64 [P, S], of positions of each sequence in a KV group; -1 where it has no block."""
    indices_SP = (positions_PS // block_size).clamp(max=tables_SB.shape[1] - 1).t()
    slots_PS = tables_SB.gather(1, indices_SP).t() * block_size + positions_PS % block_size
    return slots_PS.masked_fill(positions_PS >= capacities_S, -1)


def _starts(capacities_M: Tensor) -> Tensor:
    """``PagedRows.cu_seqlens_q`` of sequences of one row; those at the end that are padding have no blocks and none."""
    has_row_M = (capacities_M > 0).int()
    return torch.cat((has_row_M.new_zeros(1), has_row_M.cumsum(0, dtype=torch.int32)))


class Draws:
    """The drafts of all sequences, drawn one after the other with the target's own noise: a draft is accepted as often
    as the two distributions agree."""

    def __init__(self, newest: NewestTokens, vocab_size: int) -> None:
        """``vocab_size``: that of the target."""
        K, S = newest.positions_KS.shape
        self.drafts_SK = torch.empty(S, K, dtype=torch.int32, device=newest.positions_KS.device)
        self._newest, self._vocab_size = newest, vocab_size
        self._num_drawn = 0

    def draw(self, logits_SV: Tensor, target_ids: Tensor | None = None) -> Tensor:
        """The next draft of each sequence, int64 [S]. ``target_ids``: the target's token of each column; ``None``: its
        first tokens."""
        i, newest = self._num_drawn, self._newest
        params_S = newest.params_S._replace(position=newest.positions_KS[i])
        self._num_drawn += 1
        tokens_S = ops.sample(logits_SV[:, : self._vocab_size], params_S, target_ids)
        return ops.keep_draft(tokens_S, self.drafts_SK, i, self._vocab_size)
