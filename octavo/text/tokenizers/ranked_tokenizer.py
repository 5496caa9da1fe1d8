"""Tokenizers stored as byte strings by rank: Mistral's ``tekken.json`` and Kimi's ``tiktoken.model``.

A text is divided into words by a pattern; in a word, the two neighbours that together are the string of the lowest rank
become one, until none do. https://docs.mistral.ai/guides/tokenization/ and the sources of tiktoken.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from octavo.errors import CheckpointError, failures_as
from octavo.text.tokenizers.gguf_tokenizer import WORD_RULES
from octavo.text.tokenizers.tekken_template import chat_template
from octavo.text.tokenizers.token_bytes import byte_level_alphabet
from octavo.text.tokenizers.tokenizer_limits import TextLimits

TEKKEN, TIKTOKEN = "tekken.json", "tiktoken.model"
MAX_BYTES = 256 << 20
MAX_TOKENS = 1 << 20
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
OLDER_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Special tokens, in the order of their ids, of a ``tekken.json`` that does not list them."""
FIRST_LISTED = 8
"""The first version whose files all list them."""
RESERVED = 256
"""Ids behind the ranks of Kimi's tokenizer that are special tokens."""


class Ranked(NamedTuple):
    """What such a file says."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    adds_bos: bool
    """Whether texts begin with BOS, if no setting says so."""
    template: str | None


def read_tekken(file: Path) -> Ranked:
    """Read Mistral's form, whose special tokens come before the others. Raises ``CheckpointError``."""
    try:
        values = json.loads(_content(file))
        config = values["config"]
        version = int(str(config["version"]).partition("m")[0].removeprefix("v"))
        num_special = int(config["default_num_special_tokens"])
        count = int(config["default_vocab_size"]) - num_special
        if not 0 <= num_special <= MAX_TOKENS or count < 0:
            raise ValueError(f"it has {num_special} special tokens and {count} others")
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): entry["rank"] for entry in values["vocab"][:count]
        }
        listed = values.get("special_tokens")
        if listed is None and version >= FIRST_LISTED:
            raise ValueError("it lists no special_tokens")
        given = dict(enumerate(OLDER_SPECIAL)) if listed is None else {int(t["rank"]): t["token_str"] for t in listed}
        special = {index: str(given.get(index, f"<SPECIAL_{index}>")) for index in range(num_special)}
        if len(ranks) != count or max(given) >= num_special or len(set(special.values())) != num_special:
            raise ValueError("tokens are missing or come twice")
        pattern = config["pattern"]
        if not isinstance(pattern, str):
            raise TypeError("its pattern is no text")
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a tokenizer that can be read: {error!r}") from None
    backend = _backend(ranks, special, num_special, pattern, file)
    texts = set(special.values())
    named = {name: text for name, text in NAMED.items() if text in texts}
    return Ranked(backend, named, True, chat_template(version, texts))


def read_tiktoken(file: Path, config: Mapping[str, Any], declared: Mapping[int, AddedToken]) -> Ranked:
    """Read Kimi's form: a line has a string in base64 and its rank; special tokens, which ``declared`` names, are
    behind them. Raises ``CheckpointError``."""
    if config.get("tokenizer_class") != "TikTokenTokenizer":
        found = f"tokenizer_class is {config.get('tokenizer_class')!r}"
        raise CheckpointError(f"{file}: {found}; of files of this form only Kimi's, TikTokenTokenizer, can be read")
    try:
        lines = (line.split() for line in _content(file).splitlines() if line)
        ranks = {base64.b64decode(text, validate=True): int(rank) for text, rank in lines}
    except (binascii.Error, ValueError) as error:
        raise CheckpointError(f"{file}: not a tokenizer that can be read: {error!r}") from None
    names = {index: token.content for index, token in declared.items()}
    first = len(ranks)
    special = {index: names.get(index, f"<|reserved_token_{index}|>") for index in range(first, first + RESERVED)}
    (pattern,) = WORD_RULES["kimi-k2"].patterns
    return Ranked(_backend(ranks, special, 0, pattern, file), {}, False, None)


def _content(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file}: more than {MAX_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _backend(
    ranks: Mapping[bytes, int], special: Mapping[int, str], first: int, pattern: str, file: Path
) -> tokenizers.Tokenizer:
    """Byte-level BPE; ``first``: the id of rank 0."""
    if set(ranks.values()) != set(range(len(ranks))) or len(ranks) > MAX_TOKENS or len(ranks) < 256:
        raise CheckpointError(f"{file}: the ranks of {len(ranks)} strings are not 0, 1, ... without a gap")
    characters = {byte: character for character, byte in byte_level_alphabet().items()}
    texts = {string: "".join(characters[byte] for byte in string) for string in ranks}
    vocabulary = {text: first + ranks[string] for string, text in texts.items()}
    vocabulary |= {text: index for index, text in special.items()}
    merges = [(texts[left], texts[right]) for left, right in merges_of(ranks)]
    with failures_as(lambda error: CheckpointError(f"{file}: not a tokenizer that can be read: {str(error)[:500]}")):
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, spell])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    TextLimits(backend, file)
    return backend


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that make up each string, by its rank: what merging by rank does, as a list of merges."""
    merges = list[tuple[bytes, bytes]]()
    for string in sorted(ranks, key=ranks.__getitem__):
        pairs = ((string[:cut], string[cut:]) for cut in range(1, len(string)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges
