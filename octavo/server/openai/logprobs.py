"""Log-probabilities in the three forms that clients know: chat's, completions' and vLLM's for prompts."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from octavo.text.tokenizer import Tokenizer
from octavo.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    """The value itself, or ``LOWEST`` for what is below it or no number."""
    return logprob if logprob > LOWEST else LOWEST


class TokenNames:
    """How tokens are shown in answers: as text, or as ``token_id:7`` when asked so or when there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self.tokenizer = None if as_ids else tokenizer
        self._bytes_of = tokenizer

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokenizer is None else self.tokenizer.token_text(token)

    def bytes(self, token: int) -> bytes:
        """The token's true bytes, which need not be whole characters."""
        return b"" if self._bytes_of is None else self._bytes_of.token_bytes(token)


def _ranked(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The most likely tokens, best first, with the sampled token's own number wherever it is among them."""
    return [
        (token, entry.logprob if token == entry.token_id else logprob)
        for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
    ]


# --- chat ---


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames, num_top: int) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion."""
    return {
        "content": [
            {
                **_chat_entry(entry.token_id, entry.logprob, names),
                "top_logprobs": [_chat_entry(token, logprob, names) for token, logprob in _ranked(entry)[:num_top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token), "logprob": finite(logprob), "bytes": list(names.bytes(token))}


# --- completions ---


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion, piece by piece: ``text_offset`` counts characters of the whole text."""

    def __init__(self, names: TokenNames, hidden: frozenset[int], num_top: int) -> None:
        self._names = names
        self._num_top = num_top
        self._hidden = hidden
        """Special tokens, when the text does not show them."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def render(self, entries: Sequence[tuple[int, TokenLogprobs | None]]) -> dict[str, list[Any]]:
        """Go on with these (token, its entry); the first token of an echoed prompt has no entry."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in entries:
            lists["tokens"].append(self._names.name(token))
            lists["token_logprobs"].append(None if entry is None else finite(entry.logprob))
            lists["top_logprobs"].append(None if entry is None else self._top(entry))
            lists["text_offset"].append(self._offset)
            if token not in self._hidden:
                self._offset += len(self._decoder.decode(self._names.bytes(token)))
        return lists

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Token to log-probability, always with the sampled token. Where texts are equal, ids tell them apart."""
        top = {self._names.name(entry.token_id): finite(entry.logprob)}
        for token, logprob in _ranked(entry)[: self._num_top]:
            if token != entry.token_id:
                name = self._names.name(token)
                top[f"token_id:{token}" if name in top else name] = finite(logprob)
        return top


# --- prompts, in vLLM's form ---


def prompt_logprobs(
    entries: Sequence[TokenLogprobs | None], names: TokenNames, num_top: int
) -> list[dict[str, Any] | None]:
    """One entry per prompt token: id to log-probability, rank and text. The first token has none."""
    return [None if entry is None else _prompt_entry(entry, names, num_top) for entry in entries]


def _prompt_entry(entry: TokenLogprobs, names: TokenNames, num_top: int) -> dict[str, Any]:
    ranks = [(entry.token_id, entry.logprob, entry.rank)]
    ranks += [(token, logprob, rank) for rank, (token, logprob) in enumerate(_ranked(entry)[:num_top], 1)]
    return {
        str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token)}
        for token, logprob, rank in ranks
    }
