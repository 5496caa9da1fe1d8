"""Converts a choice's tokens to the text sent to the client."""

from __future__ import annotations

import msgspec

from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.reasoning import AnswerStart
from octavo.text.stop_strings import StopStrings
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """The text that further tokens add."""

    text: str
    stop: str | None
    """The stop string completed by these tokens, if any."""
    num_tokens: int
    """Number of these tokens that count: all, or up to the one that completed the stop string."""


class TextStream:
    """One choice's growing text: detokenization, stop strings and ``min_tokens``.

    Text is the same however the tokens are split over calls. Stop strings count only when a token after the
    first ``min_tokens`` completes them, as in vLLM, and only in the answer: not in the reasoning before
    it. Without a tokenizer the text stays empty; admission refuses stop strings then.
    """

    __slots__ = ("_answer", "_detokenizer", "_last_tokens", "_num_exempt", "_repetition", "_shows_stop_token", "_stops")

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        shown: frozenset[int] = frozenset(),
        answer: AnswerStart | None = None,
    ) -> None:
        """``shown`` are special tokens to decode to text even if ``params`` skip special tokens.

        ``answer`` finds where the answer begins; without it, all of the text is the answer.
        """
        self._detokenizer = (
            _NoText() if tokenizer is None else Detokenizer(tokenizer, params.skip_special_tokens, shown)
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._answer = answer
        self._shows_stop_token = params.include_stop_str_in_output
        self._repetition = params.repetition_detection
        self._last_tokens: list[int] = []
        """As many as matter to ``_repetition``, if there is one."""
        self._num_exempt = params.min_tokens
        """Number of further tokens before stop strings count."""

    def push(self, tokens: list[int], finish_reason: FinishReason | None = None) -> TextDelta:
        """What ``tokens`` add; ``finish_reason`` is the engine's, given with the last tokens.

        With ``"stop"`` the last token is the one that ended the text: it counts, but unless
        ``include_stop_str_in_output`` is set, or it only completed a repeated pattern, its text is left out, special or
        not. After a stop string was found no text is added and no token counts.
        """
        if self._repetition is not None:
            self._last_tokens = [*self._last_tokens, *tokens][-self._repetition.num_compared :]
        if self._stops is not None:
            return self._push_watched(self._stops, tokens, finish_reason)
        if finish_reason is None:
            return TextDelta(self._detokenizer.push(tokens), None, len(tokens))
        text = self._detokenizer.push(self._shown(tokens, finish_reason)) + self._detokenizer.flush()
        return TextDelta(text, None, len(tokens))

    def _push_watched(self, stops: StopStrings, tokens: list[int], finish_reason: FinishReason | None) -> TextDelta:
        """Push token by token, to find the one that completes a stop string."""
        if stops.found is not None:
            return TextDelta("", stops.found, 0)
        texts = []
        for count, token in enumerate(self._shown(tokens, finish_reason), 1):
            texts.append(self._watch(stops, self._detokenizer.push([token])))
            if stops.found is not None:
                return TextDelta("".join(texts), stops.found, count)
        if finish_reason is not None:
            for before, text in (self._divided(self._detokenizer.flush()), self._last_divided()):
                texts += [before, stops.push(text)]
            texts.append(stops.flush())
        return TextDelta("".join(texts), stops.found, len(tokens))

    def _watch(self, stops: StopStrings, text: str) -> str:
        before, text = self._divided(text)
        if self._num_exempt == 0:
            return before + stops.push(text)
        self._num_exempt -= 1
        return before + stops.pass_over(text)

    def _divided(self, text: str) -> tuple[str, str]:
        """The parts of ``text`` before and in the answer."""
        return ("", text) if self._answer is None else self._answer.push(text)

    def _last_divided(self) -> tuple[str, str]:
        return ("", "") if self._answer is None else self._answer.flush()

    def _shown(self, tokens: list[int], finish_reason: FinishReason | None) -> list[int]:
        if finish_reason != "stop" or self._shows_stop_token:
            return tokens
        if self._repetition is not None and self._repetition.found_in(self._last_tokens):
            return tokens  # a stop token ends the first of what would be repeated, so this is none
        return tokens[:-1]


class _NoText:
    """Stands in for a ``Detokenizer`` when there is no tokenizer."""

    def push(self, tokens: list[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
