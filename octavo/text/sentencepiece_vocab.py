"""Vocabularies of SentencePiece (Kudo and Richardson 2018, arXiv 1808.06226), for the ``tokenizers`` library."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from octavo.errors import CANCELLATIONS, CheckpointError
from octavo.text.token_bytes import SPACE_MARK

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
        try:
            return models.BPE(
                vocab=vocabulary,
                merges=merges,
                unk_token=self.unknown,
                fuse_unk=True,
                byte_fallback=has_byte_fallback,
            )
        except CANCELLATIONS:
            raise
        except BaseException as error:  # the library raises the bare class
            raise self.fail("tokens", str(error)) from None

    def unigram(self, has_byte_fallback: bool) -> models.Unigram:
        """Takes the pieces whose scores, logarithms of probabilities, have the largest sum."""
        unknown = None if self.unknown is None else self.tokens.index(self.unknown)
        scored = list(zip(self.tokens, self.scores, strict=True))
        try:
            return models.Unigram(vocab=scored, unk_id=unknown, byte_fallback=has_byte_fallback)
        except CANCELLATIONS:
            raise
        except BaseException as error:  # the library raises the bare class
            raise self.fail("tokens", str(error)) from None

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
