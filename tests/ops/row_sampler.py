"""From logits to tokens.

One row is treated in this order; a step that the request does not ask for is left out:

1. log-probabilities to report are taken from the logits as the model gave them;
2. mask of the grammar;
3. unless the grammar is complete: ``allowed_token_ids``; ``bad_words``, whose last token is out where the output ends
   with its others; ``min_tokens``: the ids that would end the text are out until there are as many tokens;
4. ``logit_bias``;
5. ``repetition_penalty`` (prompt and output), then ``frequency_penalty`` and ``presence_penalty`` (output);
6. with a temperature of 0 the most likely token is taken, and that is all;
7. ``temperature``; 8. ``min_p``; 9. ``top_k``; 10. ``top_p``;
11. the draw: of what is left, the token whose exponential variate divided by its probability is smallest, with
    variates that are a function of (seed, position, token id); see ``noise``.

A row's result depends on its own logits alone.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.sampling.noise import exponentials, token_hashes
from octavo.sampling_params import SamplingParams
from octavo.types import TokenLogprobs
from tests.ops import processors

NOT_NUMBERS = "the model's logits are not finite numbers"
NOTHING_LEFT = "no token is allowed here by the grammar, allowed_token_ids, bad_words and min_tokens together"
OVERFLOW = "the sampling parameters bring the logits out of range"


@dataclass(frozen=True, slots=True)
class Row:
    """One token to choose."""

    params: SamplingParams
    seed: int
    position: int
    """Where in the sequence the token will be."""
    tokens: Sequence[int | None]
    """The sequence, known up to ``position`` at least."""
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    mask: npt.NDArray[np.uint8] | None = None
    """Bits of the tokens that the grammar allows."""
    banned_sequences: Sequence[tuple[int, ...]] = ()
    """The output may complete none of these."""

    @property
    def bans_stops(self) -> bool:
        return self.position - self.num_prompt_tokens < self.params.min_tokens and bool(self.stop_token_ids)

    @property
    def is_restricted(self) -> bool:
        """Whether the request itself keeps some tokens out."""
        return self.bans_stops or bool(self.banned_sequences) or self.params.allowed_token_ids is not None

    @property
    def completing(self) -> list[int]:
        """The tokens that would complete a banned sequence."""
        reach = max(map(len, self.banned_sequences), default=1) - 1
        before = _known(self.tokens[max(self.num_prompt_tokens, self.position - reach) : self.position])
        return [
            sequence[-1]
            for sequence in self.banned_sequences
            if tuple(before[max(0, len(before) + 1 - len(sequence)) :]) == sequence[:-1]
        ]

    @property
    def must_stop(self) -> bool:
        """Whether the grammar allows only what ends the text: then it is complete, however short it is."""
        if self.mask is None:
            return False
        left = self.mask.copy()
        for token in self.stop_token_ids:
            if token // 8 < len(left):
                left[token // 8] &= 255 - (1 << token % 8)
        return not left.any()

    @property
    def is_plain(self) -> bool:
        """Whether the most likely token is taken as it is."""
        params = self.params
        return (
            params.is_greedy
            and self.mask is None
            and not params.logit_bias
            and params.repetition_penalty == 1
            and params.frequency_penalty == params.presence_penalty == 0
            and not self.is_restricted
        )


class Choice(NamedTuple):
    """What became of a row; ``error`` says why there is no token."""

    token: int
    logprobs: TokenLogprobs | None
    error: str | None


class Sampler:
    """Chooses tokens. It keeps no state of requests."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._hashes_V = token_hashes(vocab_size, device)

    def sample(self, logits_RV: Tensor, rows: Sequence[Row]) -> list[Choice]:
        """Choose a token for each row of float32 logits."""
        is_finite = are_finite(logits_RV)
        tokens = [0] * len(rows)
        errors = [None if good else NOT_NUMBERS for good in is_finite]
        plain = [r for r, row in enumerate(rows) if is_finite[r] and row.is_plain]
        if plain:
            some_RV = logits_RV if len(plain) == len(rows) else logits_RV[plain]
            for r, token in zip(plain, _likeliest(some_RV), strict=True):
                tokens[r] = token
        for r in set(range(len(rows))).difference(plain):
            if is_finite[r]:
                tokens[r], errors[r] = self._choose(logits_RV[r], rows[r])
        wanted = [r for r, row in enumerate(rows) if row.params.logprobs is not None and errors[r] is None]
        logprobs: dict[int, TokenLogprobs] = {}
        if wanted:
            counts = [rows[r].params.logprobs or 0 for r in wanted]
            found = token_logprobs(logits_RV[wanted], [tokens[r] for r in wanted], counts)
            logprobs = dict(zip(wanted, found, strict=True))
        return [Choice(tokens[r], logprobs.get(r), errors[r]) for r in range(len(rows))]

    def _choose(self, logits_V: Tensor, row: Row) -> tuple[int, str | None]:
        """The token of one row, or 0 and why there is none."""
        params = row.params
        logits_V = process(logits_V, row)
        if not params.is_greedy:
            logits_V = truncate(logits_V, params)
        best, token = logits_V.max(dim=0)
        if not math.isfinite(best):
            return 0, NOTHING_LEFT if best == processors.NEVER else OVERFLOW
        if params.is_greedy:
            return int(token), None
        ids_C = (logits_V > processors.NEVER).nonzero().squeeze(1)
        race_C = logits_V[ids_C] - exponentials(self._hashes_V[ids_C], row.seed, row.position).log_()
        return int(ids_C[race_C.argmax()]), None


def _likeliest(logits_RV: Tensor) -> list[int]:
    """The first of the most likely tokens of each row of numbers."""
    if logits_RV.device.type == "cpu":  # numpy looks for it eight times as fast as torch
        found: list[int] = logits_RV.numpy().argmax(-1).tolist()
        return found
    indices: list[int] = logits_RV.max(dim=-1).indices.tolist()
    return indices


def are_finite(logits_RV: Tensor) -> list[bool]:
    """For each row, whether all its logits are numbers: if one is not, neither is their sum."""
    finite: list[bool] = logits_RV.sum(dim=-1).isfinite().tolist()
    return finite


def process(logits_V: Tensor, row: Row) -> Tensor:
    """Steps 2 to 5: what the request changes about the logits themselves."""
    params = row.params
    if row.mask is not None:
        logits_V = processors.apply_mask(logits_V, row.mask)
    if row.is_restricted and not row.must_stop:
        logits_V = _restrict(logits_V, row)
    if params.logit_bias:
        logits_V = processors.add_bias(logits_V, params.logit_bias)
    if params.repetition_penalty != 1:
        seen = _known(row.tokens[: row.position])
        logits_V = processors.penalize_repetition(logits_V, seen, params.repetition_penalty)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        output = _known(row.tokens[row.num_prompt_tokens : row.position])
        logits_V = processors.penalize_output(logits_V, output, params.frequency_penalty, params.presence_penalty)
    return logits_V


def _restrict(logits_V: Tensor, row: Row) -> Tensor:
    if row.params.allowed_token_ids is not None:
        logits_V = processors.keep_only(logits_V, row.params.allowed_token_ids)
    return processors.ban(logits_V, [*row.completing, *(row.stop_token_ids if row.bans_stops else ())])


def truncate(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Steps 7 to 10: temperature, and which tokens stay in the draw."""
    if params.temperature != 1:
        logits_V = logits_V / params.temperature
    if params.min_p > 0:
        logits_V = processors.keep_min_p(logits_V, params.min_p)
    if params.top_k > 0:
        logits_V = processors.keep_top_k(logits_V, params.top_k)
    if params.top_p < 1:
        logits_V = processors.keep_top_p(logits_V, params.top_p)
    return logits_V


def token_logprobs(logits_RV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of finite logits: log-probability and rank of its token, and the ``counts[r]`` likeliest tokens."""
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    chosen_R1 = logprobs_RV.gather(1, torch.tensor(tokens, device=logits_RV.device).unsqueeze(1))
    ranks = ((logprobs_RV > chosen_R1).sum(dim=1) + 1).tolist()
    top = logprobs_RV.topk(min(max(counts), logprobs_RV.shape[1]), dim=1)
    chosen, top_ids, top_logprobs = chosen_R1.squeeze(1).tolist(), top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(tokens[r], chosen[r], ranks[r], top_ids[r][:count], top_logprobs[r][:count])
        for r, count in enumerate(counts)
    ]


def _known(tokens: Sequence[int | None]) -> list[int]:
    assert None not in tokens, "a token is chosen before those in front of it are known"
    return list(tokens)  # type: ignore[arg-type]
