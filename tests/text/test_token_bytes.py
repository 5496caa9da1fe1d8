"""The bytes of tokens: every byte once, added tokens as they are, other decoders refused by name."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from octavo.errors import CheckpointError
from octavo.text.tokenizers.token_bytes import byte_level_alphabet, token_bytes_table


def backend(tokens: list[str], decoder: object) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    if decoder is not None:
        made.decoder = decoder
    return made


SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def test_the_alphabet_spells_every_byte_once() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert set(alphabet) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["a"]) == (32, 10, 97)


def test_byte_level_tokens_are_their_bytes() -> None:
    made = backend(["Ġa", "ðŁĺĢ", "é"], decoders.ByteLevel())
    made.add_tokens([AddedToken("  \n", normalized=False), AddedToken("<｜end｜>", special=True)])
    table = token_bytes_table(made, "here")
    assert table == [b" a", "😀".encode(), b"\xe9", b"  \n", "<｜end｜>".encode()]


def test_sentencepiece_tokens_are_their_bytes() -> None:
    table = token_bytes_table(backend(["▁a", "<0xF0>", "<0xG0>", "é"], SENTENCEPIECE), "here")
    assert table == [b" a", b"\xf0", b"<0xG0>", "é".encode()]


def test_without_byte_fallback_a_byte_piece_is_text() -> None:
    assert token_bytes_table(backend(["<0x41>", "▁"], decoders.Metaspace()), "here") == [b"<0x41>", b" "]


def test_ids_that_are_left_out_have_no_bytes() -> None:
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 3}, []))
    made.decoder = decoders.ByteLevel()
    assert token_bytes_table(made, "here") == [b"a", b"", b"", b"b"]


def test_an_id_that_needs_all_memory_is_refused() -> None:
    made = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 2**31}, []))
    made.decoder = decoders.ByteLevel()
    with pytest.raises(CheckpointError, match=r"here: .* id 2147483648"):
        token_bytes_table(made, "here")


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.CTC(), "CTC"),
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.WordPiece()]), r"ByteLevel \+ WordPiece"),
        (decoders.Fuse(), "Fuse"),
        (None, "missing"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: object, named: str) -> None:
    with pytest.raises(CheckpointError, match=f"here: .*{named}"):
        token_bytes_table(backend(["a"], decoder), "here")
