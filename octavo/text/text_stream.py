"""Converts a choice's tokens to the text sent to the client: detokenisation and stop strings."""

from __future__ import annotations

import codecs
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.sampling_params import SamplingParams
from octavo.text.reasoning import AnswerStart
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason


@dataclass(slots=True)
class _State:
    """A prefix of a stop string; ``depth`` is its length."""

    depth: int = 0
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    """The longest proper suffix of this prefix that is a prefix too; ``None`` for the empty one."""
    stop: str | None = None
    """The longest stop string that this prefix ends with."""


class StopStrings:
    """Watches growing text for the first of several stop strings, without ever emitting part of one.

    They form one automaton (Aho and Corasick, "Efficient string matching", CACM 1975): its state is the longest suffix
    of the text that is a prefix of a stop string. One transition per character, independent of their number.

    The first to be *complete* wins; of several completed by the same character, the longest. So the result never
    depends on how the text was chunked, and no text waits for a longer match. The text before the match is emitted,
    followed by the match itself if ``include``.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self.found: str | None = None
        """The stop string that ended the text; no further text is emitted."""
        self._root = _build(tuple(stops))
        self._state = self._root
        self._include = include
        self._held = ""
        """Text held back: the prefix that ``_state`` stands for."""

    def push(self, text: str) -> str:
        """Append ``text``; returns the text that is safe to emit."""
        if self.found is not None:
            return ""
        for position, character in enumerate(text):
            self._state = _advance(self._state, character)
            if self._state.stop is not None:
                return self._end(text[: position + 1], self._state.stop)
        return self._let_out(text)

    def pass_over(self, text: str) -> str:
        """Like ``push``, for text in which a stop string may begin but not end."""
        for character in text:
            self._state = _advance(self._state, character)
        while not self._state.next and self._state.fallback is not None:
            self._state = self._state.fallback  # a complete stop string that does not count is not held back
        return self._let_out(text)

    def flush(self) -> str:
        """The text held back, at the end."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _end(self, text: str, stop: str) -> str:
        text = self._held + text
        self._held, self.found = "", stop
        return text if self._include else text[: len(text) - len(stop)]

    def _let_out(self, text: str) -> str:
        if self._include:
            return text  # a match would be emitted as well, so no text is held back
        text = self._held + text
        safe = len(text) - self._state.depth
        self._held = text[safe:]
        return text[:safe]


def _advance(state: _State, character: str) -> _State:
    """The state after one more character; amortised constant time."""
    while (following := state.next.get(character)) is None:
        if state.fallback is None:
            return state
        state = state.fallback
    return following


@functools.lru_cache(maxsize=16)
def _build(stops: tuple[str, ...]) -> _State:
    """The automaton's initial state. It is immutable, so the choices of a request share it."""
    root = _State()
    for stop in stops:
        state = root
        for character in stop:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    # Shorter prefixes first: a fallback is always shorter, so it is set before it is needed.
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, following in state.next.items():
            following.fallback = root if state.fallback is None else _advance(state.fallback, character)
            following.stop = following.stop or following.fallback.stop
            queue.append(following)
    return root


_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns a growing list of tokens into growing text.

    However the tokens are split over calls, the concatenated ``push`` and ``flush`` results equal
    ``Tokenizer.decode`` of all tokens. The bytes of an incomplete character are held back; invalid bytes are
    emitted as U+FFFD as soon as that is certain.
    """

    __slots__ = ("_complete_texts", "_decoder", "_is_inside_character", "_skipped", "_token_bytes")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        """``shown`` are special tokens to decode to text although others are skipped."""
        self._complete_texts = tokenizer.complete_texts
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._complete_texts = tokenizer.complete_texts_showing(shown)
            self._skipped = tokenizer.special_token_ids - shown
        self._token_bytes = tokenizer.token_bytes
        self._decoder = _new_decoder("replace")
        self._is_inside_character = False

    def push(self, tokens: list[int]) -> str:
        """The text that ``tokens`` complete."""
        if len(tokens) == 1 and not self._is_inside_character:
            # By far the most common call: one token that decodes to complete characters.
            text = self._complete_texts.get(tokens[0])
            if text is not None:
                return text
        data = b"".join([self._token_bytes(token) for token in tokens if token not in self._skipped])
        text = self._decoder.decode(data)
        self._is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The remainder at the end: U+FFFD for an incomplete character, else empty."""
        self._is_inside_character = False
        return self._decoder.decode(b"", final=True)


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
