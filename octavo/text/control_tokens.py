"""Control tokens that a client's text spells: they are encoded as text.

A chat template writes control tokens such as ``<|im_end|>`` between the texts of a client, and the vocabulary has one
token for each. If a web page that a tool has read spells such a token, it must not end the turn. So before the template
runs, a *barrier* is put behind the first character of every control token in a client's text. What has a barrier in it
after rendering is text, wherever the template has put it; the other control tokens are the template's own.

To encode, the template's control tokens are replaced by stand-ins, texts that no client can foresee, and a second
tokenizer, with the same model and rules, knows only these. So everything else is encoded as text, in one piece.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import InvalidParameter
from octavo.text import reasoning
from octavo.text.chat_messages import REASONING_KEYS, Message
from octavo.text.message_format import TOOL_FORMATS
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_calls.harmony import HARMONY

OWN_MARKS = frozenset(
    {
        *(mark for family in reasoning.FAMILIES for mark in family.marks),
        *(mark for format in TOOL_FORMATS if format is not HARMONY for mark in format.marks),
    }
)
"""Marks of reasoning and calls, which templates look for in the assistant's content: a model's own words have them."""
RESULT_MARKS = ("<tool_response>", "</tool_response>")
_CHANGES_TEXT = re.compile(r"(\|\s*|\.)(replace|lower|upper|title|capitalize|swapcase)\b")
_BRACKETED = re.compile(r"[<\[{|｜◁].*[>\]}|｜▷]")
_RANDOM_BITS = 80
MAX_GUARDED = 500_000
"""Most control tokens in the texts of a conversation; each is two tokens of text at least."""


class Guard:
    """Puts a barrier into the control tokens of a client's texts. Raises ``InvalidParameter`` for too many of them."""

    def __init__(self, barrier: str, anywhere: re.Pattern[str], in_answers: re.Pattern[str]) -> None:
        self._replacement = rf"\g<0>{barrier}"
        self._anywhere = anywhere
        self._in_answers = in_answers
        self._num_left = MAX_GUARDED

    def value(self, value: Any) -> Any:
        """``value``, JSON of a client, with the barrier in every control token of its texts."""
        if isinstance(value, str):
            return self._text(value, self._anywhere)
        if isinstance(value, Mapping):
            return {self.value(key): self.value(member) for key, member in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(member) for member in value]
        return value

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """``messages`` with the barrier in every control token, except for ``OWN_MARKS`` in the assistant's words."""
        made = []
        for message in messages:
            own = ("content", *REASONING_KEYS) if message["role"] == "assistant" else ()
            guarded = self.value({key: value for key, value in message.items() if key not in own})
            made.append({**message, **guarded, **{key: self._answer(message[key]) for key in own if key in message}})
        return made

    def _answer(self, text: str | None) -> str | None:
        return None if text is None else self._text(text, self._in_answers)

    def _text(self, text: str, starts: re.Pattern[str]) -> str:
        guarded, number = starts.subn(self._replacement, text, count=self._num_left + 1)
        self._num_left -= number
        if self._num_left < 0:
            message = f"The messages spell more than {MAX_GUARDED} control tokens, which is more than fits."
            raise InvalidParameter("messages", message)
        return guarded


class ControlTokens:
    """The control tokens of a model: the special ones, and other added ones that its chat template writes or that are
    marks of reasoning, calls and results."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens()
        controls = {
            index: token
            for index, token in added.items()
            if len(token.content) > 1 and (token.special or _is_mark(token.content, template or ""))
        }
        self._added, self._controls = added, controls
        self._stand_ins = {token.content: _unforeseen() for token in controls.values()}
        texts = [token.content for token in controls.values()]
        # A template that replaces or changes letters may make a control token of a text that is none.
        is_careful = _CHANGES_TEXT.search(template or "") is not None
        own = OWN_MARKS.intersection(texts)
        self._anywhere = _starts(texts, (), is_careful)
        self._in_answers = _starts([text for text in texts if text not in own], own, is_careful)

    def guard(self, barrier: str) -> Guard:
        """Puts ``barrier`` into the texts of one conversation."""
        return Guard(barrier, self._anywhere, self._in_answers)

    def encode(self, text: str, barrier: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered ``text``; control tokens with ``barrier`` in them are text. Raises
        ``InvalidParameter`` as ``Tokenizer.encode`` does."""
        text = self._spelled.sub(lambda found: self._stand_ins[found[0]], text).replace(barrier, "")
        backend, ids, words = self._backend
        encoded = self._tokenizer.encode_with(backend, text)
        tokens = [ids.get(token, token) for token in encoded]
        if not words.isdisjoint(encoded):
            parts = {word: _in_parts(backend, self._controls[word].content) for word in words}
            tokens = [part for token in encoded for part in parts.get(token) or (ids.get(token, token),)]
        if not add_special_tokens:
            return tokens
        alone, around = (self._tokenizer.encode("a", add_special_tokens=flag) for flag in (False, True))
        start = next(place for place in range(len(around)) if around[place : place + len(alone)] == alone)
        return [*around[:start], *tokens, *around[start + len(alone) :]]

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile(_tree(self._stand_ins) if self._stand_ins else "(?!)")

    @cached_property
    def _backend(self) -> tuple[tokenizers.Tokenizer, dict[int, int], frozenset[int]]:
        """The second tokenizer, the vocabulary's ids for ids that only this tokenizer has, and the ids of control
        tokens that the model may find as words; the unknown token stands for any text."""
        backend = self._tokenizer.with_rules_alone()
        unknown = self._tokenizer.special_tokens.get("unk_token"), getattr(backend.model, "unk_token", None), "<unk>"
        words = frozenset(
            index
            for index, token in self._controls.items()
            if token.content not in unknown and backend.id_to_token(index) == token.content
        )
        # The library counts new ids from the number of tokens, which a vocabulary with gaps has used for others.
        num_gaps = max(backend.get_vocab().values(), default=0) + 1 - backend.get_vocab_size()
        fillers = [AddedToken(_unforeseen(), normalized=False) for _ in range(num_gaps)]
        texts = {
            index: self._stand_ins[token.content] if index in self._controls else token.content
            for index, token in self._added.items()
        }
        # One call for all: each builds its search anew.
        backend.add_tokens([*fillers, *(_with_flags_of(self._added[index], text) for index, text in texts.items())])
        ids = {backend.token_to_id(text) or 0: index for index, text in texts.items()}
        return backend, ids, words


def _is_mark(text: str, template: str) -> bool:
    """Whether an added token that is not special is a mark. Others are words, blanks and line ends, or tags of HTML."""
    return text in OWN_MARKS or text in RESULT_MARKS or (_BRACKETED.fullmatch(text) is not None and text in template)


def _with_flags_of(token: AddedToken, text: str) -> AddedToken:
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return AddedToken(text, normalized=token.normalized, **flags)


def _in_parts(backend: tokenizers.Tokenizer, word: str) -> list[int]:
    """Ids of the text of a control token that the model has as a word."""
    return [token.id for part in (word[:1], word[1:]) for token in backend.model.tokenize(part)]


def _unforeseen() -> str:
    """Digits, which every filter of a template and every normalizer keeps."""
    return f"{secrets.randbits(_RANDOM_BITS):025}"


def _starts(texts: Iterable[str], exceptions: Iterable[str], is_careful: bool) -> re.Pattern[str]:
    """Matches the first character of each of ``texts`` where it is spelled or, if ``is_careful``, anywhere but in
    ``exceptions``."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        for first in {text[0], text[0].lower(), text[0].upper()} if is_careful else text[0]:
            rests.setdefault(first, []).append(text[1:])
    branches = []
    for first, own in rests.items():
        excepted = [text[1:] for text in exceptions if text[0] == first]
        ahead = f"(?!{_tree(excepted)})" if excepted else ""
        branches.append(re.escape(first) + ahead + ("" if is_careful else f"(?={_tree(own)})"))
    return re.compile("|".join(branches) or "(?!)")


def _tree(texts: Collection[str]) -> str:
    """A regular expression of ``texts``, the longest first, that looks at each character once."""
    prefix = os.path.commonprefix(list(texts))  # noqa: RUF071 (of texts, not of paths)
    groups: dict[str, list[str]] = {}
    for text in texts:
        rest = text[len(prefix) :]
        groups.setdefault(rest[:1], []).append(rest)
    may_end = groups.pop("", None) is not None
    branches = "|".join(map(_tree, groups.values()))
    return re.escape(prefix) + (f"(?:{branches}){'?' if may_end else ''}" if branches else "")
