"""Build a tokenizer from the metadata of a GGUF file (keys: ``docs/gguf.md`` in the ggml project)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from octavo.errors import CANCELLATIONS, CheckpointError
from octavo.text.pre_tokenizers import word_rule
from octavo.text.sentencepiece_vocab import NORMAL, SentencePieceVocab, space_marks, text_decoder
from octavo.text.tokenizer_parts import TokenizerParts, wrap_with_special_tokens
from octavo.weights.generation_config import in_vocabulary, token_ids
from octavo.weights.gguf.gguf_reader import GGUFFile

_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_parts(file: Path) -> TokenizerParts | None:
    """The tokenizer inside ``file``, or ``None`` if it has none; raise ``CheckpointError`` for a bad one."""
    return parts_from_metadata(GGUFFile.open(file).metadata, file)


def parts_from_metadata(metadata: dict[str, Any], origin: Path) -> TokenizerParts | None:
    """The tokenizer that GGUF ``metadata`` describes; ``origin`` is named in errors."""
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    reader = _Metadata(metadata, origin)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(reader)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(reader), True
    else:
        raise CheckpointError(f"{origin}: tokenizer.ggml.model is {kind!r}; only 'gpt2' and 'llama' can be handled")
    reader.pieces(None).add_to(backend, _takes_blanks(reader, kind))
    special_tokens = reader.special_tokens()
    add_bos = reader.flag("add_bos_token", adds_bos and "bos_token" in special_tokens)
    wrap_with_special_tokens(backend, special_tokens, add_bos, reader.flag("add_eos_token", False), origin)
    template, tool_template = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.chat_template.tool_use")
    return TokenizerParts(
        origin=origin,
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=tuple(sorted({i for key in _END_KEYS if (i := reader.token_id(key)) is not None})),
        chat_template=template if isinstance(template, str) else None,
        tool_template=tool_template if isinstance(tool_template, str) else None,
    )


class _Metadata:
    """The ``tokenizer.ggml.*`` keys of a file, validated on access."""

    def __init__(self, metadata: dict[str, Any], origin: Path) -> None:
        self._metadata = metadata
        self.origin = origin
        self.architecture = metadata.get("general.architecture")
        self.tokens: list[str] = self.strings("tokens")
        self.types: list[int] = [int(t) for t in self.numbers("token_type", len(self.tokens), default=NORMAL)]

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.origin}: tokenizer.ggml.{key}: {problem}")

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def strings(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, "a list of strings is needed")
        return value

    def numbers(self, key: str, length: int, default: float | None = None) -> Sequence[float]:
        value = self.get(key)
        if value is None and default is not None:
            return [default] * length
        if value is None or isinstance(value, (str, int, float)) or len(value) != length:
            raise self.fail(key, f"a list of {length} numbers is needed")
        return [float(item) for item in value]

    def pieces(self, unknown: str | None) -> SentencePieceVocab:
        """The vocabulary; scores are used, and required, by SentencePiece models only."""
        default = 0.0 if self.get("model") == "gpt2" else None
        scores = [float(score) for score in self.numbers("scores", len(self.tokens), default)]
        return SentencePieceVocab(self.tokens, scores, self.types, unknown, self.fail)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))

    def token_id(self, key: str) -> int | None:
        """The id of a special token; none, with a warning, if it is not in the vocabulary."""
        where = f"tokenizer.ggml.{key}"
        found = in_vocabulary(token_ids(self._metadata, where, str(self.origin)), len(self.tokens), where)
        return found[0] if found else None

    def special_tokens(self) -> dict[str, str]:
        ids = {name: self.token_id(key) for name, key in _SPECIAL_KEYS.items()}
        return {name: self.tokens[index] for name, index in ids.items() if index is not None}


def _byte_level(reader: _Metadata) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE with the merges of the file; and whether it begins texts with BOS by default."""
    rule = word_rule(reader.get("pre", "default"), reader.origin)
    merges = [_pair(merge, reader) for merge in reader.strings("merges")]
    vocabulary = {token: index for index, token in enumerate(reader.tokens)}
    backend = tokenizers.Tokenizer(_bpe(reader, vocabulary, merges, ignore_merges=rule.whole_words))
    if rule.compose:
        backend.normalizer = rule.normalizer()
    backend.pre_tokenizer = rule.pre_tokenizer(reader.flag("add_space_prefix", False))
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _pair(merge: str, reader: _Metadata) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise reader.fail("merges", f"{merge!r} is not two pieces with a space between")
    return left, right


def _bpe(reader: _Metadata, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except CANCELLATIONS:
        raise
    except BaseException as error:  # the library raises the bare class
        raise reader.fail("merges", str(error)) from None


def _sentencepiece(reader: _Metadata) -> tokenizers.Tokenizer:
    """SentencePiece's BPE, with byte fallback for characters without a piece."""
    unknown = reader.token_id("unknown_token_id")
    pieces = reader.pieces(None if unknown is None else reader.tokens[unknown])
    has_bytes = {f"<0x{byte:02X}>" for byte in range(256)}.issubset(pieces.tokens)
    backend = tokenizers.Tokenizer(pieces.bpe(has_bytes))
    # As in llama.cpp, what follows a special token begins with a space too.
    has_prefix = reader.flag("add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(space_marks(has_prefix))
    backend.decoder = text_decoder(has_prefix)
    return backend


def _takes_blanks(reader: _Metadata, kind: str) -> Callable[[str], bool]:
    """Phi-3's turn markers absorb the whitespace behind them, which no key of the file states."""
    if kind != "llama" or reader.architecture != "phi3":
        return lambda token: False
    return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")
