"""``tokenizer.model`` files, against SentencePiece itself, transformers, and damage."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import CheckpointError
from octavo.text.tokenizer import Tokenizer, load_tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")

SENTENCE = "the cat sat on a mat and 12 other cats, don't they? Été über 日本語 naïve coöperation 3.14 x=y+z"
WORDS = tuple(SENTENCE.split())
LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "split_digits": True,
    "allow_whitespace_only_pieces": True,
    "vocab_size": 400,
}
GEMMA = LLAMA | {"add_dummy_prefix": False, "user_defined_symbols": ["▁▁", "▁▁▁▁", "<think>", "<table>", "\n\n"]}
UNIGRAM = {"model_type": "unigram", "normalization_rule_name": "identity", "vocab_size": 90}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "bpe that tidies blanks": LLAMA | {"remove_extra_whitespaces": True},
    "bpe without bytes": LLAMA | {"byte_fallback": False, "vocab_size": 150},
    "unigram": UNIGRAM,
    "unigram with bytes": UNIGRAM | {"byte_fallback": True, "vocab_size": 350, "remove_extra_whitespaces": False},
    "unigram that tidies characters": UNIGRAM | {"normalization_rule_name": "nmt_nfkc", "vocab_size": 100},
}
PIECES = (
    *WORDS,
    " ",
    "  ",
    "     ",
    "\n",
    "\n\n",
    "\t",
    "é",
    "e\u0301",
    "😀",
    "👍🏽",
    "ﬁ",
    "Ⅳ",
    "\u00a0",
    "<think>",
    "<s>",
)
ALPHABET = "abct  eoxé日\n😀<>/"


@cache
def trained(kind: str) -> bytes:
    """A small model of this kind, trained on random sentences."""
    chance = random.Random(7)
    sentences = [" ".join(chance.choices(WORDS, k=8)) for _ in range(400)]
    model = io.BytesIO()
    options = {"hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2} | KINDS[kind]
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=model, **options)
    return model.getvalue()


def texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    fixed = ["", " ", "a", " a", "a ", "  the  cat ", "the cat sat", "\n", "▁the", "12 345", "<think>the</think>"]
    mixed = ["".join(chance.choices(PIECES, k=chance.randint(1, 12))) for _ in range(count)]
    letters = ["".join(chance.choices(ALPHABET, k=chance.randint(1, 20))) for _ in range(count)]
    return fixed + mixed + letters


def write(folder: Path, model: bytes, config: dict[str, Any] | None = None, **files: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_sentencepieces_own(tmp_path: Path, kind: str) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    tokenizer = load(write(tmp_path, trained(kind)))
    assert tokenizer.vocab_size == reference.get_piece_size()
    different = []
    for text in texts(400, seed=1):
        # SentencePiece never finds control tokens in text.
        plain = text.replace("<s>", "<").replace("</s>", "<").replace("<unk>", "<")
        if tokenizer.encode(plain, add_special_tokens=False) != reference.encode(plain):
            different.append(plain)
    assert not different


@pytest.mark.parametrize("kind", ["llama", "gemma", "unigram with bytes"])
def test_decoding_gives_the_text_back(tmp_path: Path, kind: str) -> None:
    tokenizer = load(write(tmp_path, trained(kind)))
    prefix = "" if kind == "gemma" else " "
    for text in texts(100, seed=2):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        decoded = tokenizer.decode(tokens, skip_special_tokens=False)
        if text and "<s>" not in text:
            assert decoded == (prefix + text).replace("▁", " ")


def test_special_tokens_of_the_model_and_of_the_config(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, trained("llama")))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("</s>", add_special_tokens=False) == [2]
    both = load(write(tmp_path, trained("llama"), {"add_bos_token": False, "add_eos_token": True, "eos_token": "<s>"}))
    assert both.encode("the") == [*tokenizer.encode("the", add_special_tokens=False), 1]
    assert both.special_tokens["eos_token"] == "<s>"


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **usual, **flags}


def test_added_tokens_get_the_ids_that_they_are_declared_with(tmp_path: Path) -> None:
    size = load(write(tmp_path, trained("llama"))).vocab_size
    added = {"0": token("<unk>"), str(size + 1): token("<|end|>"), str(size): token("<|user|>", rstrip=True)}
    tokenizer = load(write(tmp_path, trained("llama"), {"added_tokens_decoder": added}))
    ids = tokenizer.encode("<|user|> \nthe<|end|>", add_special_tokens=False)
    the = tokenizer.encode("the", add_special_tokens=False)
    assert ids == [size, *the, size + 1]
    assert {size, size + 1} < tokenizer.special_token_ids
    older = load(write(tmp_path, trained("llama"), added_tokens={"<|end|>": size}))
    assert older.encode("the<|end|>", add_special_tokens=False) == [*the, size]


def test_a_declared_token_takes_the_place_of_an_unused_piece(tmp_path: Path) -> None:
    first = load(write(tmp_path, trained("gemma")))
    (place,) = first.encode("<table>", add_special_tokens=False)
    config = {"added_tokens_decoder": {str(place): token("<|tool|>")}}
    tokenizer = load(write(tmp_path, trained("gemma"), config))
    assert tokenizer.encode("<|tool|>", add_special_tokens=False) == [place]
    assert len(tokenizer.encode("<table>", add_special_tokens=False)) > 1
    assert tokenizer.vocab_size == first.vocab_size


@pytest.mark.parametrize("index", ["399999", "3"])
def test_an_added_token_with_another_id_is_refused(tmp_path: Path, index: str) -> None:
    # The byte that has id 3 cannot be replaced.
    write(tmp_path, trained("llama"), {"added_tokens_decoder": {index: token("<|end|>")}})
    with pytest.raises(CheckpointError, match=rf"the added token '<\|end\|>' should have id {index}, found"):
        load(tmp_path)


@pytest.mark.parametrize("legacy", [True, False])
def test_blanks_after_special_tokens(tmp_path: Path, legacy: bool) -> None:
    tokenizer = load(write(tmp_path, trained("llama"), {"legacy": legacy}))
    (the,) = tokenizer.encode("the", add_special_tokens=False)
    after = tokenizer.encode("</s>the", add_special_tokens=False)
    assert (after == [2, the]) == legacy
    assert tokenizer.decode(after) == (" the" if legacy else "the")


def test_no_blank_in_front_on_request(tmp_path: Path) -> None:
    for legacy in (True, False):
        tokenizer = load(write(tmp_path, trained("llama"), {"add_prefix_space": False, "legacy": legacy}))
        for text in ("the cat", " the cat", "</s>the"):
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == "<s>" + text


def test_the_newer_rule_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write(tmp_path, trained("llama"), {"legacy": False, "tokenizer_class": "LlamaTokenizer"})
    reference = transformers.LlamaTokenizer.from_pretrained(folder)
    tokenizer = load(folder)
    for text in texts(200, seed=3):
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text


def changed(kind: str, **changes: Any) -> bytes:
    proto = pb2.ModelProto.FromString(trained(kind))
    for path, value in changes.items():
        part, field = path.split("__")
        setattr(getattr(proto, part), field, value)
    return bytes(proto.SerializeToString())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (b"x", "not a SentencePiece model that can be read"),
        (b"", "it has no pieces"),
        (trained("llama")[:-40], "not a SentencePiece model that can be read"),
        (changed("llama", trainer_spec__model_type=3), r"trainer_spec\.model_type: is 3, supported are 1"),
        (changed("llama", trainer_spec__treat_whitespace_as_suffix=True), r"trainer_spec\.treat_whitespace_as_suffix"),
        (changed("llama", normalizer_spec__escape_whitespaces=False), r"normalizer_spec\.escape_whitespaces false"),
        (changed("llama", normalizer_spec__precompiled_charsmap=b"abc"), "precompiled_charsmap"),
    ],
)
def test_a_damaged_or_unknown_model_is_refused(tmp_path: Path, model: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*{message}"):
        load(write(tmp_path, model))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"legacy": "no"}, "legacy: must be true or false"),
        ({"add_bos_token": 1}, "add_bos_token: must be true or false"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder: expected an object"),
        ({"added_tokens_decoder": {"x": token("a")}}, "added_tokens_decoder: 'x' is not a token id"),
        ({"added_tokens_decoder": {"1": {}}}, "added_tokens_decoder: 1: a token must have a text"),
    ],
)
def test_bad_settings_in_the_models_folder_are_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {message}"):
        load(write(tmp_path, trained("llama"), config))
