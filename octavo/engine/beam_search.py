"""Beam search: the most likely continuations of a prompt, as vLLM searches for them.

In each step every beam becomes a request for one token, with the log-probabilities of twice as many tokens as there are
beams. The prefix cache holds what beams have in common, so they share its blocks, and a step computes little more than
one token of each beam.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.errors import InvalidParameter
from octavo.sampling_params import MAX_LOGPROBS, MAX_TOKEN_ID, SamplingParams
from octavo.types import FinishReason


class Scored(Protocol):
    """What is known of a token that may come next."""

    @property
    def logprob(self) -> float: ...


MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_LENGTH_PENALTY = 10.0


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search; invalid values raise ``InvalidParameter``."""

    beam_width: int
    """Number of beams kept in each step, and of sequences returned; 1 is greedy."""
    max_tokens: int
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Whether end-of-text tokens are tokens like any other."""
    length_penalty: float = 1.0
    """The score of a sequence is its log-probability divided by the power ``length_penalty`` of its length, which
    counts the prompt and does not count an end-of-text token. 0 compares log-probabilities."""

    def __post_init__(self) -> None:
        for name, high in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", MAX_TOKEN_ID)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= high:
                raise InvalidParameter(name, f"'{name}' must be a whole number from 1 to {high}, not {value!r}.")
        penalty = self.length_penalty
        if type(penalty) not in (int, float) or not abs(penalty) <= MAX_LENGTH_PENALTY:
            allowed = f"from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
            raise InvalidParameter("length_penalty", f"'length_penalty' must be a number {allowed}, not {penalty!r}.")

    def one_token(self) -> SamplingParams:
        """The parameters of the requests that a step consists of."""
        return SamplingParams(temperature=0, max_tokens=1, logprobs=2 * self.beam_width, num_speculative_tokens=0)


def check_beam_search(params: Any) -> None:
    """Raise ``InvalidParameter`` unless ``params`` are ``BeamSearchParams``."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidParameter("params", f"'params' must be BeamSearchParams, not {type(params).__name__}.")


@dataclass
class BeamSearchSequence:
    """A sequence that a beam search found."""

    tokens: list[int]
    """Prompt and output; with the end-of-text token that ended it, if one did."""
    logprobs: list[Mapping[int, Any]] = field(default_factory=list)
    """For each output token, the log-probabilities of the tokens that were compared: a ``Scored`` of each, in ``LLM`` a
    ``Logprob``."""
    cum_logprob: float = 0.0
    """Natural-log probability of the output."""
    text: str | None = None
    """Text of ``tokens``, without special tokens; ``None`` if the model has no tokenizer."""
    finish_reason: FinishReason | None = None
    """``"stop"`` after an end-of-text token, otherwise ``"length"``."""
    stop_reason: int | None = None
    """The end-of-text token that ended it."""

    def score(self, length_penalty: float) -> float:
        """See ``BeamSearchParams.length_penalty``."""
        length = len(self.tokens) - (self.stop_reason is not None)
        return float(self.cum_logprob / max(length, 1) ** length_penalty)


class BeamSearch:
    """The beams of one prompt."""

    def __init__(self, prompt: list[int], eos_token_ids: Collection[int], params: BeamSearchParams) -> None:
        self.params = params
        self.eos_token_ids = frozenset(eos_token_ids)
        self.beams = [BeamSearchSequence(prompt)]
        """The unfinished sequences; none of them when nothing is left to search."""
        self._ended: list[BeamSearchSequence] = []

    def advance(self, candidates: Sequence[Mapping[int, Scored]]) -> None:
        """Replace the beams by their best continuations, of the candidates for each one's next token."""
        grown: list[BeamSearchSequence] = []
        for beam, logprobs in zip(self.beams, candidates, strict=True):
            for sequence in self._continued(beam, logprobs):
                (grown if sequence.stop_reason is None else self._ended).append(sequence)
        self.beams = self._best(grown)
        self._ended = self._best(self._ended)

    def best(self) -> list[BeamSearchSequence]:
        """The best sequences, those that have not ended included."""
        for beam in self.beams:
            beam.finish_reason = "length"
        return self._best([*self._ended, *self.beams])

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        penalty = self.params.length_penalty
        return sorted(sequences, key=lambda sequence: -sequence.score(penalty))[: self.params.beam_width]

    def _continued(self, beam: BeamSearchSequence, logprobs: Mapping[int, Scored]) -> Iterator[BeamSearchSequence]:
        for token, entry in logprobs.items():
            ends = token in self.eos_token_ids
            yield BeamSearchSequence(
                [*beam.tokens, token],
                [*beam.logprobs, logprobs],
                beam.cum_logprob + entry.logprob,
                finish_reason="stop" if ends else None,
                stop_reason=token if ends else None,
            )
