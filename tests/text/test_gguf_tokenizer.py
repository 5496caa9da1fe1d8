"""Tokenizers out of GGUF metadata: both families, their flags, and what is refused."""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import CheckpointError
from octavo.text.tokenizers import sentencepiece_model
from octavo.text.tokenizers.gguf_tokenizer import parts_from_metadata, word_rule
from octavo.text.tokenizers.sentencepiece_model import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED

from .conftest import build, byte_level_metadata

PIECES = ["▁", "a", "b", "c", "ab", "abc", "▁a", "▁ab", "bc", "aa", "▁▁", "ca", "caa"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary in SentencePiece's manner: unknown, BOS, EOS, 256 bytes, one user-defined token, pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<think>", *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 260 + [-100.0] * 4 + [-float(i) for i in range(len(PIECES) - 4)]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items() if value is not None}


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE by its definition: merge the neighbours whose joint piece scores best, leftmost first."""
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


SPM = sentencepiece_metadata()
SPM_TOKENIZER = build(SPM)
SCORES = dict(zip(SPM["tokenizer.ggml.tokens"], SPM["tokenizer.ggml.scores"].tolist(), strict=True))


@settings(max_examples=300, deadline=None)
@given(text=st.text("abc  é", min_size=1, max_size=30))
def test_sentencepiece_merges_the_best_piece_first(text: str) -> None:
    tokens = SPM["tokenizer.ggml.tokens"]
    pieces = merged_by_score("▁" + text.replace(" ", "▁"), {p: SCORES[p] for p in PIECES})
    expected = [
        p if p in PIECES else f"<0x{byte:02X}>" for p in pieces for byte in (p.encode() if p not in PIECES else b"x")
    ]
    assert [tokens[t] for t in SPM_TOKENIZER.encode(text, add_special_tokens=False)] == expected
    assert SPM_TOKENIZER.decode(SPM_TOKENIZER.encode(text)) == " " + text


def test_sentencepiece_special_and_user_defined_tokens_are_matched_in_text() -> None:
    names = [SPM["tokenizer.ggml.tokens"][t] for t in SPM_TOKENIZER.encode("a<think>b</s>")]
    assert names == ["<s>", "▁a", "<think>", "▁", "b", "</s>"]
    assert SPM_TOKENIZER.special_token_ids == {0, 1, 2}
    assert SPM_TOKENIZER.eos_token_ids == (2,)
    # A byte token is not matched by its name.
    assert SPM_TOKENIZER.decode(SPM_TOKENIZER.encode("<0x41>")) == " <0x41>"


def test_sentencepiece_flags() -> None:
    plain = build(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert plain.decode(plain.encode("ab"), skip_special_tokens=False) == "ab</s>"
    assert SPM_TOKENIZER.decode(SPM_TOKENIZER.encode("ab"), skip_special_tokens=False) == "<s> ab"


def test_byte_level_flags() -> None:
    tokenizer = build(byte_level_metadata(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the")[-1] == 2
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    assert build(byte_level_metadata()).encode("the") == tokenizer.encode("the", add_special_tokens=False)


def test_families_that_begin_with_bos_and_keep_whole_words() -> None:
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "xyz"]
    tokenizer = build(byte_level_metadata(pre="llama-bpe", tokens=tokens, token_type=None))
    assert tokenizer.encode("xyz") == [1, len(tokens) - 1]
    assert len(build(byte_level_metadata(tokens=tokens, token_type=None)).encode("xyz")) == 3


def test_user_defined_tokens_are_matched_but_not_special() -> None:
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "   "]
    types = [*byte_level_metadata()["tokenizer.ggml.token_type"], USER_DEFINED]
    tokenizer = build(byte_level_metadata(tokens=tokens, token_type=types))
    ids = tokenizer.encode("t   t")
    assert ids[1:-1] == [len(tokens) - 1]
    assert tokenizer.decode(ids) == "t   t"


def test_every_end_of_turn_is_known() -> None:
    assert build(byte_level_metadata()).eos_token_ids == (0, 2)
    assert build(byte_level_metadata(eot_token_id=5)).eos_token_ids == (0, 2, 5)
    normal = build(byte_level_metadata(token_type=None, eos_token_id=None))
    assert normal.eos_token_ids == ()


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_without_a_tokenizer(model: str | None) -> None:
    assert parts_from_metadata(byte_level_metadata(model=model), Path("a.gguf")) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert'; only 'gpt2', 'llama' and"),
        ({"pre": "nobody"}, "'nobody'; known are"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens: a list of strings is needed"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens: a list of strings is needed"),
        ({"merges": None}, r"tokenizer\.ggml\.merges: a list of strings is needed"),
        ({"merges": ["th"]}, r"tokenizer\.ggml\.merges: 'th' is not two pieces"),
        ({"merges": ["nothere orthere"]}, r"tokenizer\.ggml\.merges: "),
        ({"token_type": [1, 2]}, r"tokenizer\.ggml\.token_type: a list of \d+ numbers is needed"),
        ({"eos_token_id": -1}, r"tokenizer\.ggml\.eos_token_id is -1; it must be a token id"),
        ({"bos_token_id": "1"}, r"tokenizer\.ggml\.bos_token_id is '1'; it must be a token id"),
        ({"add_bos_token": True, "bos_token_id": None}, "add_bos_token is set, but there is no bos_token"),
        (
            {"model": "llama", "tokens": ["x" * 257], "token_type": None, "scores": [0.0], "unknown_token_id": None},
            r"tokenizer\.ggml\.tokens: a piece has more than 256 characters",
        ),
        ({"model": "llama", "scores": None}, r"tokenizer\.ggml\.scores: a list of \d+ numbers is needed"),
    ],
)
def test_bad_metadata_is_refused_by_file_and_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{message}"):
        parts_from_metadata(byte_level_metadata(**changes), Path("a.gguf"))


def test_pieces_that_can_be_merged_in_too_many_ways_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentencepiece_model, "MAX_MERGES", 20)
    few, many = (["<unk>", *("a" * count for count in range(1, longest))] for longest in (6, 8))
    for tokens in few, many:
        given = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens), "token_type": None}
        ids = {"unknown_token_id": 0, "bos_token_id": None, "eos_token_id": None}
        if tokens is few:
            assert parts_from_metadata(byte_level_metadata(**given, **ids), Path("a.gguf")) is not None
            continue
        with pytest.raises(CheckpointError, match="tokens: the pieces can be merged in more than 20 ways"):
            parts_from_metadata(byte_level_metadata(**given, **ids), Path("a.gguf"))


def test_special_tokens_beyond_the_vocabulary_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    parts = parts_from_metadata(byte_level_metadata(eos_token_id=10**6, padding_token_id=2**32 - 1), Path("a.gguf"))
    assert parts is not None
    assert "eos_token" not in parts.special_tokens
    assert "tokenizer.ggml.eos_token_id: 1000000 is not below the size of the vocabulary" in caplog.text


SENTENCE = "The cat's 1234 HATS, don't they?\n\n Été e\u0301 日本語 naïve \u212b 3.14 x=y+z  \t😀 'LL it'll"
WORDS = (*SENTENCE.split(" "), "हिन्दी")


def byte_level_reference(name: str) -> Any:
    """A tokenizer of transformers' own making for this family."""
    transformers = pytest.importorskip("transformers")
    if name == "gpt-2":
        return transformers.GPT2Tokenizer(vocab={}, merges=[]).backend_tokenizer
    if name == "qwen2":
        return transformers.Qwen2Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).backend_tokenizer
    if name == "qwen35":
        classes = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
        return classes.Qwen3_5Tokenizer(vocab={"<|endoftext|>": 0}, merges=[]).backend_tokenizer
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = convert.TikTokenConverter().pattern
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


@pytest.mark.parametrize(
    ("rule", "text", "words"),
    [
        ("jais-2", "a" + 7 * " " + "b1234", ["a", "ĠĠĠĠ", "ĠĠ", "Ġb", "123", "4"]),
        ("laguna", "a\n\nb !\n12", ["a", "ĊĊ", "b", "Ġ!", "Ċ", "1", "2"]),
    ],
)
def test_words_that_spaces_and_ends_of_lines_divide(rule: str, text: str, words: list[str]) -> None:
    cut = word_rule(rule, "").pre_tokenizer(add_prefix_space=False)
    assert [word for word, _ in cut.pre_tokenize_str(text)] == words


def test_words_of_kimi() -> None:
    """Chinese characters are words of their own, and a contraction belongs to its word."""
    cut = word_rule("kimi-k2", "").pre_tokenizer(add_prefix_space=False)
    text = "aé日本HELLOworld's 12345 it'll\n"
    words = ["aé", "日本", "HELLOworld's", " ", "123", "45", " it'll", "\n"]
    assert [text[slice(*span)] for _, span in cut.pre_tokenize_str(text)] == words


def test_pieces_with_merges_hold_spaces_and_line_ends() -> None:
    """As files of Gemma 4 have them: spaces are part of pieces, and unknown characters are spelled in bytes."""
    tokens = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        *(f"<0x{i:02X}>" for i in range(256)),
        "a",
        "b",
        "\u2581",
        "\n",
        "\n\n",
    ]
    tokens += ["\u2581a", "\u2581ab"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.merges": ["\u2581 a", "\u2581a b", "\n \n"],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = build(metadata)
    found = tokenizer.encode("a ab\n\né")
    assert [tokens[i] for i in found] == ["<bos>", "a", "\u2581ab", "\n\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(found[1:]) == "a ab\n\né"


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "qwen35", "glm4", "llama-bpe", "lfm2"])
def test_byte_level_tokens_equal_the_reference(name: str) -> None:
    reference, chance = byte_level_reference(name), random.Random(3)
    sentences = [" ".join(chance.choices(WORDS, k=8)) for _ in range(300)]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    reference.train_from_iterator(sentences, trainer)
    model = json.loads(reference.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    metadata = byte_level_metadata(
        pre=name,
        tokens=tokens,
        merges=[" ".join(merge) for merge in model["merges"]],
        token_type=None,
        add_bos_token=False,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "unknown_token_id")),
    )
    tokenizer = build(metadata)
    for _ in range(500):
        text = "".join(chance.choices((*WORDS, " ", "  ", "\n", "\r", "/"), k=chance.randint(1, 12)))
        assert tokenizer.encode(text) == reference.encode(text, add_special_tokens=False).ids, text


def test_sentencepiece_tokens_are_its_own() -> None:
    """A model as SentencePiece trains it, in the keys into which llama.cpp's converter puts it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    chance, model = random.Random(5), io.BytesIO()
    sentences = [" ".join(chance.choices(WORDS, k=8)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(reference.get_piece_size())
    kinds = {0: UNKNOWN, 1: CONTROL, 2: CONTROL} | {i: BYTE for i in ids if reference.is_byte(i)}
    tokenizer = build(
        sentencepiece_metadata(
            tokens=[reference.id_to_piece(i) for i in ids],
            token_type=[kinds.get(i, NORMAL) for i in ids],
            scores=[reference.get_score(i) for i in ids],
        )
    )
    for _ in range(500):
        text = "".join(chance.choices((*WORDS, " ", "  ", "\n"), k=chance.randint(1, 12)))
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text), text


def test_phi_3s_special_tokens_take_the_blanks_behind_them() -> None:
    metadata = sentencepiece_metadata(add_bos_token=False)
    others = build(metadata)
    phi3 = build(metadata | {"general.architecture": "phi3"})
    assert phi3.encode("</s> \na") == others.encode("</s>a") != others.encode("</s> \na")
    assert phi3.encode("<s> a") == others.encode("<s> a")


def test_chat_templates_of_a_file() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "usual"}
    assert (build(metadata).chat_template, build(metadata).tool_template) == ("usual", None)
    assert build(metadata | {"tokenizer.chat_template.tool_use": "tools"}).tool_template == "tools"


def test_gemma_4_has_pieces_with_merges() -> None:
    """Spaces are marks, as with scores, and the merges decide: here the last piece by score comes first."""
    merges = ["c a", "ca a", "▁ a", "a b"]
    tokenizer = build(sentencepiece_metadata(model="gemma4", merges=merges, add_space_prefix=False))
    for text, pieces in (("caab", ["caa", "b"]), (" aab", [" a", "ab"]), ("ab\n\n", ["ab", "\n", "\n"])):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.token_text(i) for i in ids] == pieces
        assert tokenizer.decode(ids) == text
    assert (
        tokenizer.decode(tokenizer.encode("é <think>", add_special_tokens=False), skip_special_tokens=False)
        == "é <think>"
    )
    with pytest.raises(CheckpointError, match="merges: a list of strings is needed"):
        build(sentencepiece_metadata(model="gemma4"))
