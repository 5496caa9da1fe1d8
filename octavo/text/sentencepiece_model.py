"""Read a SentencePiece model, ``tokenizer.model``, as a ``tokenizers`` backend.

The fields are those of ``sentencepiece_model.proto`` in https://github.com/google/sentencepiece. Text is tokenized as
by SentencePiece, except around special tokens, which SentencePiece does not match in text: the text behind one is
separate and gets its own leading space. With ``legacy`` false in tokenizer_config.json only the beginning of the
input gets one, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from octavo.errors import CANCELLATIONS, CheckpointError
from octavo.text.sentencepiece_vocab import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceVocab,
    space_marks,
    text_decoder,
)
from octavo.text.token_bytes import SPACE_MARK

MAX_MODEL_BYTES = 64 << 20
UNIGRAM, BPE = 1, 2
"""Values of ``model_type``."""
SPECIAL_FIELDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unk", "pad_token": "pad"}


class SentencePieceModel:
    """A parsed model. Raises ``CheckpointError`` for one that is damaged or not supported."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._proto = _parse(file)
        trainer, normalizer = self._proto.trainer_spec, self._proto.normalizer_spec
        if trainer.model_type not in (UNIGRAM, BPE):
            problem = f"is {trainer.model_type}, supported are 1, unigram, and 2, BPE"
            raise self._fail("trainer_spec.model_type", problem)
        for name, found in (
            ("trainer_spec.treat_whitespace_as_suffix", trainer.treat_whitespace_as_suffix),
            ("normalizer_spec.escape_whitespaces false", not normalizer.escape_whitespaces),
            ("denormalizer_spec.precompiled_charsmap", self._proto.denormalizer_spec.precompiled_charsmap),
        ):
            if found:
                raise self._fail(name, "is not supported")

    def special_tokens(self) -> dict[str, str]:
        """``bos_token`` and the like, those that the model has."""
        trainer, tokens = self._proto.trainer_spec, [piece.piece for piece in self._proto.pieces]
        ids = {name: getattr(trainer, f"{field}_id") for name, field in SPECIAL_FIELDS.items()}
        return {name: tokens[index] for name, index in ids.items() if 0 <= index < len(tokens)}

    def backend(self, config: Mapping[str, Any], declared: Mapping[int, AddedToken]) -> tokenizers.Tokenizer:
        """The tokenizer, configured by ``tokenizer_config.json``. ``declared`` tokens may replace unused pieces."""
        proto = self._proto
        has_bytes = bool(proto.trainer_spec.byte_fallback)
        pieces = self._pieces(declared)
        is_unigram = proto.trainer_spec.model_type == UNIGRAM
        backend = tokenizers.Tokenizer(pieces.unigram(has_bytes) if is_unigram else pieces.bpe(has_bytes))
        has_prefix = self._flag(config, "add_prefix_space", proto.normalizer_spec.add_dummy_prefix)
        steps = self._cleaning()
        if self._flag(config, "legacy", True):
            steps += space_marks(has_prefix)
        else:
            scheme = "first" if has_prefix else "never"
            backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=scheme, split=False)
        if steps:
            backend.normalizer = normalizers.Sequence(steps)
        backend.decoder = text_decoder(has_prefix, has_bytes)
        pieces.add_to(backend)
        return backend

    def _pieces(self, declared: Mapping[int, AddedToken]) -> SentencePieceVocab:
        tokens = [piece.piece for piece in self._proto.pieces]
        kinds = [piece.type for piece in self._proto.pieces]
        known = set(tokens)
        for index, kind in enumerate(kinds):
            if kind == USER_DEFINED:
                # It is matched in raw text, where a space is not yet U+2581.
                spaced = tokens[index].replace(SPACE_MARK, " ")
                tokens[index] = tokens[index] if spaced in known else spaced
            if index in declared and kind in (NORMAL, CONTROL, USER_DEFINED, UNUSED):
                text = declared[index].content
                tokens[index] = tokens[index] if text in known else text
        unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
        if unknown is None:
            raise self._fail("pieces", "none of them is of the kind unknown")
        if len(set(tokens)) < len(tokens):
            raise self._fail("pieces", "some piece is there twice")
        return SentencePieceVocab(tokens, [piece.score for piece in self._proto.pieces], kinds, unknown, self._fail)

    def _cleaning(self) -> list[normalizers.Normalizer]:
        """Normalizers applied before spaces are replaced."""
        spec = self._proto.normalizer_spec
        steps: list[normalizers.Normalizer] = []
        if spec.precompiled_charsmap:
            try:
                steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
            except CANCELLATIONS:
                raise
            except BaseException as error:  # the library raises the bare class
                raise self._fail("normalizer_spec.precompiled_charsmap", str(error)) from None
        if spec.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        return steps

    def _flag(self, config: Mapping[str, Any], name: str, default: bool) -> bool:
        value = config.get(name)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.file.parent / 'tokenizer_config.json'}: {name}: must be true or false")
        return default if value is None else value

    def _fail(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {name}: {problem}")


def _parse(file: Path) -> Any:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        if file.stat().st_size > MAX_MODEL_BYTES:
            raise CheckpointError(f"{file}: more than {MAX_MODEL_BYTES} bytes")
        proto = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())  # type: ignore[attr-defined]
    except (OSError, DecodeError) as error:
        raise CheckpointError(f"{file}: not a SentencePiece model that can be read: {error}") from None
    if not proto.pieces:
        raise CheckpointError(f"{file}: not a SentencePiece model: it has no pieces")
    return proto
