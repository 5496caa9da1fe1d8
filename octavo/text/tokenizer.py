"""Encoding and decoding text, over the ``tokenizers`` library; what a request may ask of tokens and of a model."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import tokenizers
from tokenizers import models

from octavo.errors import CANCELLATIONS, InvalidParameter
from octavo.grammar.vocabulary import Vocabulary, pack_tokens
from octavo.sampling_params import SamplingParams
from octavo.system.cpus import num_cpus
from octavo.text.tokenizers import folder_tokenizer, gguf_tokenizer
from octavo.text.tokenizers.token_bytes import token_bytes_table
from octavo.text.tokenizers.tokenizer_check import check_folder
from octavo.text.tokenizers.tokenizer_limits import TextLimits
from octavo.text.tokenizers.tokenizer_parts import TokenizerParts
from octavo.types import EngineInfo, Task


def look_up_whole_words(backend: tokenizers.Tokenizer) -> bool:
    """Make ``backend`` look words up before merging if that gives the same tokens for every text; returns whether it
    does.

    Merging a word from its characters takes a lookup per character and two per merge; a word in the vocabulary is found
    with one (``ignore_merges``). The tokens are the same if every token's own text merges to that token.
    Every token is tested, at 2 to 5 microseconds each. Added tokens need not merge to themselves, because they are
    split off before text is split into words, except those matched at word boundaries only.
    """
    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return False
    if model.ignore_merges:
        return True
    taken_out = {token.content for token in backend.get_added_tokens_decoder().values() if not token.single_word}
    vocabulary = backend.get_vocab(with_added_tokens=False)
    is_same = all(
        [token.id for token in model.tokenize(text)] == [index]
        for text, index in vocabulary.items()
        if text not in taken_out
    )
    model._clear_cache()  # it is full of the tested words and would accept no others
    model.ignore_merges = is_same
    return is_same


TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end_of_turn|>", "<end_of_turn>", "<|endoftext|>", "</s>")
"""Special tokens that end a turn in any vocabulary that has them; many checkpoints declare only one."""

FIRST_PART = 1 << 16
"""Characters of the first part that is looked at."""
USUAL_CHARACTERS = 8
"""For each token, at most, in most texts; only the others are looked at in parts."""
CHARACTERS_AT_ONCE = 1 << 20
"""Of texts that are encoded by one call of the library, which keeps some 100 bytes for each token."""
CACHED_WORDS = 1000
"""Of each thread. The library's own limit of 10,000 words takes 70 MB in each thread if a client sends long ones. Where
words in the vocabulary are looked up, a cache of the others makes nothing faster."""


class Tokenizer:
    """Encodes text to tokens and decodes tokens to text.

    Encoding runs outside Python and releases the interpreter lock. Decoding is the UTF-8 decoding of the
    tokens' bytes, invalid bytes becoming U+FFFD. On valid text it equals the library's own decoding with
    one deliberate difference: a leading space is never stripped and whitespace never cleaned up, so that the
    texts of a prompt and of its continuation concatenate to the text of both.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._limits = TextLimits(parts.backend, parts.origin)
        self._bytes = token_bytes_table(parts.backend, parts.origin)
        self.vocab_size = len(self._bytes)
        """One more than the largest id."""
        self.longest_token_bytes = max(map(len, self._bytes), default=0)
        """Hence a text of more than n times this number of bytes has more than n tokens."""
        added = parts.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        self.special_tokens = dict(parts.special_tokens)
        """The chat template's variables ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``."""
        self.bos_token_id = self._id_of(self.special_tokens.get("bos_token"))
        turn_ends = (self._id_of(text) for text in TURN_ENDS)
        known = {index for index in turn_ends if index in self.special_token_ids}
        self.eos_token_ids = tuple(sorted({*parts.eos_token_ids, *known} - {None}))
        """Every id that ends a text or a turn: those that the checkpoint declares, and those in ``TURN_ENDS``."""
        self.chat_template = parts.chat_template
        self.tool_template = parts.tool_template
        self._parallel: ParallelTokenizer | None = None
        self._texts_showing: dict[frozenset[int], dict[int, str]] = {}
        """Cache of ``complete_texts_showing``; a model has one or two sets of shown special tokens."""
        self._marks: dict[str, list[int]] = {}
        """Cache of ``encode_mark``."""

    def prepare_to_encode(self) -> None:
        """Warm up for encoding many texts: spends up to a second so that each ``encode`` is faster."""
        has_whole_words = look_up_whole_words(self._backend)
        model = self._backend.model
        if hasattr(model, "_resize_cache"):
            model._resize_cache(0 if has_whole_words else CACHED_WORDS)
        encode = partial(encode_texts, self._backend)
        if can_split(self._backend, self._bytes, encode):
            self._parallel = ParallelTokenizer(self._backend, encode)
        with contextlib.suppress(InvalidParameter):  # as a request with this text would get
            self.encode("The first text takes longer.")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in the text are recognised as such.

        ``add_special_tokens`` puts beginning- and end-of-text tokens around it, as the checkpoint says.
        Raises ``InvalidParameter`` for a string that is not Unicode text (it has an unpaired surrogate), or that the
        library cannot encode, or could make far longer.
        """
        if self._takes_apart(text):
            assert self._parallel is not None
            return self._parallel.encode(text, add_special_tokens)
        (encoding,) = encode_texts(self._backend, [text], add_special_tokens)
        return list(encoding.ids)

    def encode_mark(self, text: str) -> list[int]:
        """Token ids of a mark of the model's format, alone; they are kept, so no client may choose ``text``."""
        if text not in self._marks:
            self._marks[text] = self.encode(text, add_special_tokens=False)
        return self._marks[text]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of each text; the library encodes several at the same time."""
        found: list[list[int]] = []
        some: list[str] = []
        room = CHARACTERS_AT_ONCE
        for text in texts:
            is_alone = self._takes_apart(text) or len(text) > CHARACTERS_AT_ONCE
            if is_alone or len(text) > room:
                found += self._encoded(some)
                some, room = [], CHARACTERS_AT_ONCE
            if is_alone:
                found.append(self.encode(text))
            else:
                some.append(text)
                room -= len(text)
        return found + self._encoded(some)

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """``encode`` of short texts that were checked."""
        return [list(encoding.ids) for encoding in encode_texts(self._backend, texts, True)] if texts else []

    def _takes_apart(self, text: str) -> bool:
        """Whether the parts of a long text are encoded at the same time. Raises as ``encode`` does."""
        _check_unicode(text)
        if len(text) > self._limits.harmless_characters:
            self._limits.check(text)
        return self._parallel is not None and self._parallel.takes(text)

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a beginning of ``text`` has more than twice ``limit`` tokens, so that the text has more than that.

        Takes no more time than the tokens that are allowed do, as a long text is not looked at to its end.
        """
        length = max(FIRST_PART, 2 * limit)
        if len(text) <= USUAL_CHARACTERS * limit:
            return False
        while length < len(text):
            if len(self.encode(text[:length], add_special_tokens=False)) > 2 * limit:
                return True
            length *= 4
        return False

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of two texts joined with the checkpoint's special tokens, and the index of the first token of
        type 1 (the length if there is none). Raises ``InvalidParameter`` as ``encode`` does."""
        for text in (first, second):
            _check_unicode(text)
            self._limits.check(text)
        (encoding,) = encode_texts(self._backend, [(first, second)], add_special_tokens=True)
        types = list(encoding.type_ids)
        return list(encoding.ids), types.index(1) if 1 in types else len(types)

    def encode_shortened(
        self, texts: Sequence[str], max_tokens: int, side: Literal["left", "right"] = "right", adds_special: bool = True
    ) -> tuple[list[int], int]:
        """As ``encode`` a text or ``encode_pair`` two, without tokens at the ``side`` beyond ``max_tokens``, special
        ones included: of two texts, the longer one loses them. Raises ``InvalidParameter``."""
        characters = max_tokens * self.longest_token_bytes + FIRST_PART  # what is beyond has no part in the result
        shown = [text[:characters] if side == "right" else text[-characters:] for text in texts]
        for text in shown:
            _check_unicode(text)
            self._limits.check(text)
        parts = encode_texts(self._backend, shown, add_special_tokens=False)
        num_special = self._backend.num_special_tokens_to_add(len(parts) == 2) if adds_special else 0
        room = max(0, max_tokens - num_special)
        if sum(len(part.ids) for part in parts) > room:
            for part, length in zip(parts, _shortened([len(part.ids) for part in parts], room), strict=True):
                part.truncate(length, direction=side)
        whole = self._backend.post_process(parts[0], parts[1] if len(parts) == 2 else None, adds_special)
        types = list(whole.type_ids)
        return list(whole.ids), types.index(1) if 1 in types else len(types)

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``tokens``; unknown ids are ignored."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return b"".join([self.token_bytes(t) for t in tokens if t not in skipped]).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to the text, special or not; empty for an unknown id."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        r"""Name of ``token`` in logprobs: its text, or ``bytes:\xe2\x80`` for part of a character, as in the OpenAI
        completions API (so that different parts have different names)."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @cached_property
    def complete_texts(self) -> dict[int, str]:
        """Texts of the tokens whose bytes alone are valid UTF-8: most of them."""
        texts = {}
        for token, data in enumerate(self._bytes):
            try:
                texts[token] = data.decode()
            except UnicodeDecodeError:
                continue
        return texts

    def complete_texts_showing(self, shown: frozenset[int]) -> dict[int, str]:
        """``complete_texts`` with empty text for special tokens, except those ``shown``."""
        if shown not in self._texts_showing:
            self._texts_showing[shown] = self.complete_texts | dict.fromkeys(self.special_token_ids - shown, "")
        return self._texts_showing[shown]

    def special_ids_by_text(self) -> dict[str, int]:
        """Ids of special tokens by their text."""
        return {self.token_bytes(token).decode("utf-8", "replace"): token for token in self.special_token_ids}

    def encode_with(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        """Token ids of ``text`` by ``backend``, one with the rules of this tokenizer. Raises as ``encode`` does."""
        _check_unicode(text)
        if len(text) > self._limits.harmless_characters:
            self._limits.check(text)
        (encoding,) = encode_texts(backend, [text])
        return list(encoding.ids)

    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Special tokens, and others that are found in a text before it is split into words, by id."""
        return dict(self._backend.get_added_tokens_decoder())

    def with_rules_alone(self) -> tokenizers.Tokenizer:
        """A backend that shares the model and the rules, and has none of the added tokens."""
        backend = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self._backend.pre_tokenizer
        return backend

    def vocabulary(self, eos_token_ids: Iterable[int]) -> Vocabulary:
        """The vocabulary for grammars; ``eos_token_ids`` may end a text in addition to the tokenizer's own."""
        ends = {*eos_token_ids, *self.eos_token_ids}.intersection(range(self.vocab_size))
        specials = sorted(self.special_token_ids | ends)
        return Vocabulary(self._bytes, specials, sorted(ends), lambda text: self.encode(text, add_special_tokens=False))

    @cached_property
    def packed_tokens(self) -> bytes:
        """All tokens' bytes, packed for the process that tests grammars."""
        return pack_tokens(self._bytes)

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._backend.token_to_id(text)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter("prompt", f"Character {error.start} of the text is an unpaired surrogate.") from None


def _shortened(lengths: Sequence[int], room: int) -> list[int]:
    """The lengths of one text or two that are too long together: as much of the shorter one as half of the room has."""
    if len(lengths) == 1:
        return [room]
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


def encode_texts(
    backend: tokenizers.Tokenizer, texts: Sequence[str | tuple[str, str]], add_special_tokens: bool = False
) -> list[tokenizers.Encoding]:
    """Encode ``texts`` outside the interpreter lock, which the library's call for one text would hold.

    Raises ``InvalidParameter`` for a text with which the library fails, as it does at a regular expression that has to
    go back too often.
    """
    try:
        return list(backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens))
    except CANCELLATIONS:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        reason = " ".join(str(error).split())[:200]
        raise InvalidParameter("prompt", f"The model's tokenizer cannot encode this text: {reason}.") from None


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint: a folder with ``tokenizer.json``, or a ``.gguf`` file.

    ``None`` when the checkpoint has none, so that it can serve token ids only. Raises ``CheckpointError``
    for one that is damaged or of a kind that cannot be handled.
    """
    if path.is_dir():
        check_folder(path)
    read = folder_tokenizer.read_parts if path.is_dir() else gguf_tokenizer.read_parts
    parts = read(path)
    return None if parts is None else Tokenizer(parts)


Sequences = tuple[tuple[int, ...], ...]


def banned_sequences(words: Iterable[str], tokenizer: Tokenizer) -> Sequences:
    """Token ids of each bad word, without and with a leading space, since vocabularies encode a word differently at
    the beginning of a text; duplicates are removed.

    These are the encodings that vLLM's ``bad_words`` bans; other encodings of the same text are not banned.
    """
    spellings = (space + word.lstrip(" ") for word in words for space in ("", " "))
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
    return tuple(dict.fromkeys(sequence for sequence in found if sequence))


def check_something_is_left(params: SamplingParams, banned: Sequences, stop_token_ids: Collection[int]) -> None:
    """Raise ``InvalidParameter`` if no first token is allowed. Tokens in ``stop_token_ids`` are banned before
    ``min_tokens``."""
    if params.allowed_token_ids is None:
        return
    out = {sequence[0] for sequence in banned if len(sequence) == 1}.union(stop_token_ids if params.min_tokens else ())
    if out.issuperset(params.allowed_token_ids):
        message = "'allowed_token_ids' has only tokens that 'bad_words' or 'min_tokens' keep out."
        raise InvalidParameter("allowed_token_ids", message)


def check_task(task: Task, info: EngineInfo) -> None:
    """Raise ``InvalidParameter`` unless the model can do ``task``."""
    if task not in info.tasks:
        raise InvalidParameter("model", f"This model can {' and '.join(info.tasks)}; it cannot {task}.")


def check_params(params: SamplingParams, info: EngineInfo) -> None:
    """Raise ``InvalidParameter`` for what this model or engine does not have."""
    most = info.max_logprobs
    for field, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > most:
            raise InvalidParameter(field, f"'{field}' must be a whole number from 0 to {most} (max_logprobs).")
    if params.return_routed_experts and info.routes is None:
        message = "'return_routed_experts' is for a mixture of experts with --enable-return-routed-experts."
        raise InvalidParameter("return_routed_experts", message)
    for field in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        check_in_vocabulary(getattr(params, field) or (), field, info)


def check_prompt(tokens: Collection[int], field: str, info: EngineInfo) -> None:
    """Raise ``InvalidParameter`` for a prompt without tokens or with others than the model's."""
    if not tokens:
        raise InvalidParameter(field, f"'{field}' must not be empty.")
    check_in_vocabulary(tokens, field, info)


def check_in_vocabulary(tokens: Collection[int], field: str, info: EngineInfo) -> None:
    """Raise ``InvalidParameter`` unless every id is one of the model's tokens."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < info.vocab_size:
            shown = token if -(2**64) < token < 2**64 else "a number of over 64 bits"
            message = f"'{field}' has {shown}, which is not a token id: they go from 0 to {info.vocab_size - 1}."
            raise InvalidParameter(field, message)


def end_tokens(params: SamplingParams, tokenizer: Tokenizer | None, info: EngineInfo) -> tuple[int, ...]:
    """The tokens that end a text."""
    own = () if tokenizer is None else tokenizer.eos_token_ids
    ids = () if params.ignore_eos else {*info.eos_token_ids, *own}
    return tuple(sorted(token for token in ids if token < info.vocab_size))


MIN_CHUNK = 8192
"""Characters of a chunk, at least: they take milliseconds, and handing work to a thread a tenth of one."""
MAX_SEARCH = 4096
"""Characters in which a boundary is looked for; without one, the chunk before becomes longer."""
_BOUNDARY = re.compile(r"[A-Za-z](?= [A-Za-z])")
_LETTER_AND_SPACE = re.compile(rb"[A-Za-z] ")
_PROBE_WORDS = (*"abMZ", *"  \n\t\r", *"019", *"'.,-/_(", "'s", "'ll", "é", "\u0301", "中", "م", "ſ", "😀", "\u00a0")
_PROBE_LENGTH = 8_000


Encode = Callable[[list[str]], list[tokenizers.Encoding]]
"""Encodes texts without special tokens around them, outside the interpreter lock. Raises ``InvalidParameter``."""


class ParallelTokenizer:
    """Tokenises long texts in several threads; the token ids are those of the unsplit text."""

    def __init__(self, backend: tokenizers.Tokenizer, encode: Encode) -> None:
        """``backend``: one for which ``can_split``."""
        self._backend, self._encode = backend, encode
        self._num_threads = num_cpus()

    def takes(self, text: str) -> bool:
        """Whether this text is long enough for two chunks, and there are several CPUs for them."""
        return len(text) >= 2 * MIN_CHUNK and self._num_threads > 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids, with the special tokens that surround a text if asked for."""
        chunks = _chunks(text, min(self._num_threads, len(text) // MIN_CHUNK))
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *(token for ids in self._threads.map(self._encode_chunk, chunks) for token in ids), *after]

    def _encode_chunk(self, chunk: str) -> list[int]:
        return list(self._encode([chunk])[0].ids)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "tokenise")

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        around = self._backend.encode("a")
        start = around.special_tokens_mask.index(0)
        end = len(around.ids) - around.special_tokens_mask[::-1].index(0)
        return list(around.ids[:start]), list(around.ids[end:])


def can_split(backend: tokenizers.Tokenizer, tokens: Iterable[bytes], encode: Encode) -> bool:
    """Whether splitting a text changes none of its tokens. ``tokens``: the bytes of all, added ones as well."""
    if not isinstance(backend.model, models.BPE) or backend.model.dropout or any(map(_LETTER_AND_SPACE.search, tokens)):
        return False
    if not encode(["a"])[0].ids:  # a vocabulary without letters
        return False
    added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
    if any(token.rstrip and token.content[-1].isalpha() for token in added):
        return False
    words = [*_PROBE_WORDS, *(token.content for token in added[:8])]
    probe = "".join(random.Random(0).choices(words, k=_PROBE_LENGTH))
    try:
        (unsplit,) = encode([probe])
        chunks = encode(list(_split_at(probe, _boundaries(probe))))
    except InvalidParameter:
        return False
    return list(unsplit.ids) == [token for chunk in chunks for token in chunk.ids]


def _boundaries(text: str) -> Iterator[int]:
    return (found.end() for found in _BOUNDARY.finditer(text))


def _chunks(text: str, most: int) -> list[str]:
    """Up to ``most`` chunks of about the same length."""
    boundaries = []
    for number in range(1, most):
        target = number * len(text) // most
        found = _BOUNDARY.search(text, target, target + MAX_SEARCH)
        if found is not None:
            boundaries.append(found.end())
    return list(_split_at(text, boundaries))


def _split_at(text: str, boundaries: Iterable[int]) -> Iterator[str]:
    start = 0
    for end in boundaries:
        yield text[start:end]
        start = end
    yield text[start:]
