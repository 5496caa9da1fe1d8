"""Read a SentencePiece model (Kudo and Richardson 2018, arXiv 1808.06226), ``tokenizer.model``, or a GGUF file's
vocabulary of that kind, as a ``tokenizers`` backend.

The fields are those of ``sentencepiece_model.proto`` in https://github.com/google/sentencepiece. Text is tokenized as
by SentencePiece, except around special tokens, which SentencePiece does not match in text: the text behind one is
separate and gets its own leading space. With ``legacy`` false in tokenizer_config.json only the beginning of the
input gets one, as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import CheckpointError, failures_as
from octavo.text.tokenizers.token_bytes import SPACE_MARK

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece and GGUF number them."""
MAX_PIECE_CHARACTERS = 256
"""Limit for a piece built by merges, well above any real vocabulary; building merges takes quadratic time."""
MAX_MERGES = 1 << 20
"""Limit of merges, nearly twice those of 256k pieces; each takes a quarter of a kilobyte until they are sorted."""


@dataclass(frozen=True)
class SentencePieceVocab:
    """A vocabulary: text, score and kind of each token. ``fail`` makes the error for one of these lists."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    unknown: str | None
    fail: Callable[[str, str], CheckpointError]

    def bpe(self, has_byte_fallback: bool) -> models.BPE:
        """Merges the best-scored piece first; characters without one become bytes or the unknown token."""
        vocabulary = {token: index for index, token in enumerate(self.tokens)}
        normal = {token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind == NORMAL}
        if any(len(piece) > MAX_PIECE_CHARACTERS for piece in normal):
            raise self.fail("tokens", f"a piece has more than {MAX_PIECE_CHARACTERS} characters")
        merges = merges_from_scores({token: self.scores[vocabulary[token]] for token in normal})
        if len(merges) > MAX_MERGES:
            raise self.fail("tokens", f"the pieces can be merged in more than {MAX_MERGES} ways")
        with failures_as(lambda error: self.fail("tokens", str(error))):
            return models.BPE(
                vocab=vocabulary, merges=merges, unk_token=self.unknown, fuse_unk=True, byte_fallback=has_byte_fallback
            )

    def unigram(self, has_byte_fallback: bool) -> models.Unigram:
        """Takes the pieces whose scores, logarithms of probabilities, have the largest sum."""
        unknown = None if self.unknown is None else self.tokens.index(self.unknown)
        scored = list(zip(self.tokens, self.scores, strict=True))
        with failures_as(lambda error: self.fail("tokens", str(error))):
            return models.Unigram(vocab=scored, unk_id=unknown, byte_fallback=has_byte_fallback)

    def add_to(self, backend: tokenizers.Tokenizer, takes_blanks: Callable[[str], bool] = lambda token: False) -> None:
        """Register the tokens that are matched in raw text: control, unknown, user-defined.

        ``takes_blanks`` says which special tokens absorb the whitespace behind them.
        """
        kinds = list(zip(self.tokens, self.kinds, strict=True))
        backend.add_special_tokens(
            [
                AddedToken(token, normalized=False, special=True, rstrip=takes_blanks(token))
                for token, kind in kinds
                if kind in (CONTROL, UNKNOWN)
            ]
        )
        backend.add_tokens(
            [AddedToken(token, normalized=False, special=False) for token, kind in kinds if kind == USER_DEFINED]
        )


def merges_from_scores(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Merges equivalent to SentencePiece's scores: every split of a piece into two, best piece first.

    There are no more than one above ``MAX_MERGES``.
    """
    ranked = (
        (-score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    )
    return [(left, right) for _, left, right in sorted(islice(ranked, MAX_MERGES + 1))]


def space_marks(has_prefix: bool) -> list[normalizers.Normalizer]:
    """Spaces become U+2581; with ``has_prefix``, one is prepended to every text."""
    mark = normalizers.Replace(" ", SPACE_MARK)
    return [normalizers.Prepend(SPACE_MARK), mark] if has_prefix else [mark]


def text_decoder(has_prefix: bool, has_byte_fallback: bool = True) -> decoders.Decoder:
    """The decoder from pieces to text."""
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " ")]
    if has_byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


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
            with failures_as(lambda error: self._fail("normalizer_spec.precompiled_charsmap", str(error))):
                steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
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
