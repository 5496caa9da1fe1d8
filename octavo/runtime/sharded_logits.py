"""The vocabulary of a step's logits: on one device, or divided among ranks.

A rank's logits are those of its part of the vocabulary. Token ids of masks, biases and histories are numbered from the
beginning of that part; ids of other ranks are then outside and ignored.

Shapes: R rows, V tokens of this rank, W ranks, N numbers of a report, n most likely tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.collective import Collective
from octavo.ops.sampling.divided_vocabulary import UNDECIDED, choose_tokens, find_candidates
from octavo.ops.sampling.noise import token_hashes
from octavo.ops.sampling.sampling import GREEDY_BELOW, SampleParams
from octavo.quant.stored.shard import Shard

RAW = "raw_logprobs"
LOWEST = -9999.0
"""Reported where there is no probability: JSON has no infinity, and other servers have this."""


class ShardedVocabulary(Protocol):
    """What is computed from logits, and how this device numbers token ids."""

    first: int
    """The first token of this device; its ids count from it."""

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """Those of ``ids`` that this device has, as it numbers them."""
        ...

    def mask_bits(self, bits: bytes) -> bytes:
        """This device's part of a mask."""
        ...

    def sample(self, logits_RV: Tensor, params: SampleParams) -> Tensor:
        """See ``ops.sample``."""
        ...

    def report(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> Tensor:
        """Log-probabilities of ``tokens_R`` (int32) and of the most likely tokens, in the layout of ``steps.reports``.

        Rows whose token is negative have unspecified content.
        """
        ...

    def report_sampled(
        self, logits_RV: Tensor, adjusted_RV: Tensor, params: SampleParams, tokens_R: Tensor, num_top: int
    ) -> Tensor:
        """``report`` of sampled tokens, in the mode of the settings; ``adjusted``: what was sampled from."""
        ...

    def report_prompt(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int, temperature: float) -> Tensor:
        """``report`` of a prompt's tokens, in the mode of the settings."""
        ...

    def are_finite(self, logits_RV: Tensor) -> bool:
        """Whether all logits are finite numbers."""
        ...

    def whole(self, logits_RV: Tensor) -> Tensor:
        """The logits of the whole vocabulary."""
        ...


class WholeVocabulary:
    """The vocabulary on one device."""

    first = 0

    def __init__(self, mode: str = RAW) -> None:
        """``mode``: one of ``config.LOGPROBS_MODES``."""
        self._mode = mode

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """See ``ShardedVocabulary``."""
        return list(ids)

    def mask_bits(self, bits: bytes) -> bytes:
        """See ``ShardedVocabulary``."""
        return bits

    def sample(self, logits_RV: Tensor, params: SampleParams) -> Tensor:
        """See ``ShardedVocabulary``."""
        return ops.sample(logits_RV, params)

    def report(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> Tensor:
        """See ``ShardedVocabulary``."""
        found = ops.token_logprobs(logits_RV, tokens_R, min(num_top, logits_RV.shape[1]))
        return _as_report(found.logprob_R, found.rank_R, found.top_ids_Rn, found.top_logprobs_Rn)

    def report_sampled(
        self, logits_RV: Tensor, adjusted_RV: Tensor, params: SampleParams, tokens_R: Tensor, num_top: int
    ) -> Tensor:
        """See ``ShardedVocabulary``."""
        if self._mode == RAW:
            return self.report(logits_RV, tokens_R, num_top)
        if self._mode.startswith("processed"):
            return self._report_whole(ops.processed_logits(self.whole(adjusted_RV), params), tokens_R, num_top)
        return self._report_whole(self.whole(logits_RV), tokens_R, num_top)

    def report_prompt(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int, temperature: float) -> Tensor:
        """See ``ShardedVocabulary``."""
        if self._mode == RAW:
            return self.report(logits_RV, tokens_R, num_top)
        whole_RV = self.whole(logits_RV).float()
        if self._mode.startswith("processed") and temperature >= GREEDY_BELOW:
            whole_RV = whole_RV / torch.tensor(temperature, dtype=torch.float32, device=whole_RV.device)
        return self._report_whole(whole_RV, tokens_R, num_top)

    def _report_whole(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> Tensor:
        found = ops.token_logprobs(logits_RV, tokens_R, min(num_top, logits_RV.shape[1]))
        chosen_R, top_Rn = found.logprob_R, found.top_logprobs_Rn
        if self._mode.endswith("logits"):
            chosen_R = logits_RV.float().gather(1, tokens_R.clamp(min=0).long().unsqueeze(1))[:, 0]
            top_Rn = logits_RV.float().gather(1, found.top_ids_Rn.long())
        lowest = [value.clamp(min=LOWEST) for value in (chosen_R, top_Rn)]
        return _as_report(lowest[0], found.rank_R, found.top_ids_Rn, lowest[1])

    def are_finite(self, logits_RV: Tensor) -> bool:
        """See ``ShardedVocabulary``."""
        return bool(logits_RV.float().sum(dim=-1).isfinite().all())

    def whole(self, logits_RV: Tensor) -> Tensor:
        """See ``ShardedVocabulary``."""
        return logits_RV


WHOLE = WholeVocabulary()


class GatheredVocabulary(WholeVocabulary):
    """A rank's part of the vocabulary, on a GPU: logits are gathered, so that captured steps never ask the host."""

    def __init__(self, own: range, vocab_size: int, collective: Collective, mode: str = RAW) -> None:
        super().__init__(mode)
        self.first = own.start
        self._own, self._vocab_size, self._collective = own, vocab_size, collective
        self._widest = -(-vocab_size // (8 * collective.size)) * 8

    def own_ids(self, ids: Sequence[int]) -> list[int]:
        """See ``ShardedVocabulary``."""
        return [token - self.first for token in ids if token in self._own]

    def mask_bits(self, bits: bytes) -> bytes:
        """See ``ShardedVocabulary``; parts begin at a multiple of 8."""
        return bits[self._own.start // 8 : -(-self._own.stop // 8)]

    def sample(self, logits_RV: Tensor, params: SampleParams) -> Tensor:
        """See ``ShardedVocabulary``."""
        return super().sample(self.whole(logits_RV), params)

    def report(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> Tensor:
        """See ``ShardedVocabulary``."""
        return super().report(self.whole(logits_RV), tokens_R, num_top)

    def are_finite(self, logits_RV: Tensor) -> bool:
        """See ``ShardedVocabulary``."""
        return super().are_finite(self.whole(logits_RV))

    def whole(self, logits_RV: Tensor) -> Tensor:
        """See ``ShardedVocabulary``; parts but the last are of one width."""
        padded = torch.nn.functional.pad(logits_RV, (0, self._widest - logits_RV.shape[1]))
        return self._collective.all_gather(padded).transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()


class CandidateVocabulary(GatheredVocabulary):
    """A rank's part of the vocabulary, on the host: logits are only gathered where candidates do not decide."""

    def __init__(self, own: range, vocab_size: int, collective: Collective, mode: str = RAW) -> None:
        super().__init__(own, vocab_size, collective, mode)
        self._hashes = token_hashes(vocab_size, torch.device("cpu"))

    def sample(self, logits_RV: Tensor, params: SampleParams) -> Tensor:
        """See ``ShardedVocabulary``."""
        own_hashes = self._hashes[self._own.start : self._own.stop]
        found_RK = find_candidates(logits_RV, params, own_hashes, self.first)
        tokens_R = choose_tokens(self._collective.all_gather(found_RK), params, self._hashes)
        rows = (tokens_R == UNDECIDED).nonzero()[:, 0]
        if len(rows):
            tokens_R[rows] = ops.sample(self.whole(logits_RV[rows]), SampleParams(*(p[rows] for p in params)))
        return tokens_R

    def report(self, logits_RV: Tensor, tokens_R: Tensor, num_top: int) -> Tensor:
        """See ``ShardedVocabulary``."""
        n = min(num_top, self._vocab_size)
        asks_A = (tokens_R >= 0).nonzero()[:, 0]
        logits_AV, tokens_A = logits_RV[asks_A].float(), tokens_R[asks_A].long()
        index_A1 = (tokens_A - self.first).clamp(0, len(self._own) - 1).unsqueeze(1)
        is_own_A = (tokens_A >= self._own.start) & (tokens_A < self._own.stop)
        chosen_A = logits_AV.gather(1, index_A1)[:, 0].masked_fill(~is_own_A, -torch.inf)
        values_An, ids_An = self._most_likely(logits_AV, n)
        sent = (logits_AV.double().logsumexp(1), chosen_A.double())
        found = self._collective.all_gather(torch.cat((torch.stack(sent, 1), values_An, ids_An), dim=1))
        total_A, chosen_A = found[:, :, 0].logsumexp(0), found[:, :, 1].amax(0)
        values_AU, ids_AU = (part.transpose(0, 1).flatten(1) for part in (found[:, :, 2 : 2 + n], found[:, :, 2 + n :]))
        # Ranks are in the order of ids, and so is each rank's list where values are equal.
        order_An = values_AU.sort(dim=1, descending=True, stable=True).indices[:, :n]
        greater_A = (logits_AV.double() > chosen_A.unsqueeze(1)).sum(dim=1)
        rank_A = self._collective.all_gather(greater_A).sum(0) + 1
        report_RN = torch.zeros(len(tokens_R), 2 + 2 * n, dtype=torch.int32)
        report_RN[asks_A] = _as_report(
            (chosen_A - total_A).float(),
            rank_A.int(),
            ids_AU.gather(1, order_An).int(),
            (values_AU.gather(1, order_An) - total_A.unsqueeze(1)).float(),
        )
        return report_RN

    def are_finite(self, logits_RV: Tensor) -> bool:
        """See ``ShardedVocabulary``."""
        own = torch.tensor([WHOLE.are_finite(logits_RV)])
        return bool(self._collective.all_gather(own).all())

    def _most_likely(self, logits_AV: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """The ``n`` largest logits of this rank and their ids, ties in order of ids; float64 [A, n]."""
        ordered = logits_AV.sort(dim=1, descending=True, stable=True)
        values_An = torch.full((len(logits_AV), n), -torch.inf, dtype=torch.float64)
        ids_An = torch.zeros(len(logits_AV), n, dtype=torch.float64)
        count = min(n, logits_AV.shape[1])
        values_An[:, :count] = ordered.values[:, :count].double()
        ids_An[:, :count] = ordered.indices[:, :count].double() + self.first
        return values_An, ids_An


def part_of_vocabulary(
    vocab_size: int, collective: Collective, is_on_host: bool = True, mode: str = RAW
) -> ShardedVocabulary:
    """The part of a rank."""
    if collective.size == 1:
        return WholeVocabulary(mode)
    own = Shard(collective.rank, collective.size).tokens(vocab_size)
    return (CandidateVocabulary if is_on_host else GatheredVocabulary)(own, vocab_size, collective, mode)


def _as_report(logprob_R: Tensor, rank_R: Tensor, top_ids_Rn: Tensor, top_logprobs_Rn: Tensor) -> Tensor:
    """int32 [R, N]."""
    numbers = (logprob_R.view(torch.int32).unsqueeze(1), rank_R.unsqueeze(1))
    return torch.cat((*numbers, top_ids_Rn, top_logprobs_Rn.contiguous().view(torch.int32)), dim=1)
