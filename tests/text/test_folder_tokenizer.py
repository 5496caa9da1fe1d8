"""Tokenizers out of Hugging Face folders, against the reference and against damage."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from octavo.errors import CheckpointError
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tokenizers.token_bytes import byte_level_alphabet

BOS, EOS, TURN = 259, 260, 261
ADDED = {"content": "<end>", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def write_folder(folder: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A byte-level tokenizer whose own post-processor puts BOS in front; ``files`` are further JSON files."""
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    vocabulary = {token: index for index, token in enumerate([*alphabet, "th", "the", "Ġthe"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("t", "h"), ("th", "e"), ("Ġ", "the")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "<end>", "<|im_end|>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.enable_truncation(5)
    backend.enable_padding(length=5)
    backend.save(str(folder / "tokenizer.json"))
    base = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", **ADDED},
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(base | (config or {})))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_a_folder_as_it_usually_is(tmp_path: Path) -> None:
    tokenizer = load(write_folder(tmp_path))
    assert tokenizer.encode("the the") == [BOS, 257, 258]
    assert tokenizer.encode("the the", add_special_tokens=False) == [257, 258]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (BOS, (EOS, TURN))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<end>"}
    assert tokenizer.vocab_size == 262
    assert tokenizer.chat_template is None


def test_the_files_own_truncation_and_padding_are_off(tmp_path: Path) -> None:
    tokenizer = load(write_folder(tmp_path))
    assert len(tokenizer.encode("xyz" * 10)) == 31
    assert tokenizer.encode("x") == [BOS, ord("x")]


@pytest.mark.parametrize(
    "config",
    [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}, {"add_eos_token": True}],
)
def test_encoding_equals_the_reference(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path, config)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("the thé", "a<|im_end|>b<s>", " the\n😀"):
        for add_special_tokens in (True, False):
            expected = reference(text, add_special_tokens=add_special_tokens, truncation=False, padding=False)
            assert load(folder).encode(text, add_special_tokens) == expected["input_ids"]


def declared(content: str, **flags: bool) -> dict[str, Any]:
    return {"__type": "AddedToken", **ADDED, "content": content, "special": True, **flags}


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"262": declared("<new>")}},
        {"added_tokens_decoder": {"263": declared("<newer>"), "262": declared("<new>", special=False)}},
        {"added_tokens_decoder": {"261": declared("<|im_end|>", rstrip=True)}},
        {"added_tokens_decoder": {"261": declared("<|im_end|>", special=False, single_word=True)}},
        {"added_tokens_decoder": {"256": declared("th", special=False)}},
        {"additional_special_tokens": ["<x>", "<s>"]},
        {"extra_special_tokens": {"image_token": "<im>"}},
        {"pad_token": "<pad>", "mask_token": "<x>", "unk_token": None},
        {"pad_token": declared("<pad>", rstrip=True)},
        {"eos_token": "the"},
    ],
)
def test_added_tokens_equal_the_reference(tmp_path: Path, config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    write_folder(tmp_path, config)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"padding": None, "truncation": None}))
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), load(tmp_path)
    text = "a<new> b<newer>c<|im_end|> x<|im_end|>d<x> the<s> th<pad>  <im> x"
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    added = {index: (t.content, t.special) for index, t in reference.added_tokens_decoder.items()}
    assert tokenizer.special_token_ids == {index for index, (_, special) in added.items() if special}


def test_a_declared_token_with_another_id_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"added_tokens_decoder": {"400": declared("<new>")}})
    with pytest.raises(CheckpointError, match="the added token '<new>' should have id 400, found 262"):
        load(tmp_path)


def test_every_configured_end_is_known(tmp_path: Path) -> None:
    write_folder(tmp_path, generation_config={"eos_token_id": [7, 8]}, config={"eos_token": None})
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert load(tmp_path).eos_token_ids == (7, 8, 9, TURN)


@pytest.mark.parametrize("value", [-1, 1e12, "2", True, [2, None], 2**32])
def test_ends_that_cannot_be_token_ids(tmp_path: Path, value: Any) -> None:
    write_folder(tmp_path, generation_config={"eos_token_id": value})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is .*; it must be a token id"):
        load(tmp_path)


def test_special_tokens_map_fills_in(tmp_path: Path) -> None:
    write_folder(tmp_path, {"eos_token": None}, special_tokens_map={"eos_token": "<end>", "pad_token": "<s>"})
    assert load(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<s>"}


def test_chat_templates_in_their_places(tmp_path: Path) -> None:
    assert load(write_folder(tmp_path, {"chat_template": "plain"})).chat_template == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    assert load(write_folder(tmp_path, {"chat_template": named})).chat_template == "usual"
    assert load(tmp_path).tool_template == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert (load(tmp_path).chat_template, load(tmp_path).tool_template) == ("from the file", "tools")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    assert load(tmp_path).tool_template == "tools from a file"


def test_the_chat_template_of_a_model_with_a_processor(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template={"chat_template": "of the processor"})
    assert load(tmp_path).chat_template == "of the processor"
    assert load(write_folder(tmp_path, {"chat_template": "plain"})).chat_template == "plain"


def test_no_tokenizer_is_none_but_another_form_is_refused(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "vocab.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"has vocab\.json; only tokenizer\.json, tokenizer\.model, tekken\.json"):
        load_tokenizer(tmp_path)


def write_qwen(folder: Path, merges: str, vocabulary: Any = None) -> None:
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    known = {token: index for index, token in enumerate([*alphabet, "th", "the", "Ġthe", "Ã©"])}
    (folder / "vocab.json").write_text(json.dumps(known if vocabulary is None else vocabulary))
    (folder / "merges.txt").write_text(merges)
    turn = {"content": "<|im_end|>", "special": True, "normalized": False}
    config = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "add_bos_token": False}
    config |= {"added_tokens_decoder": {str(len(known)): turn}, "chat_template": "it"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


PAIRS = "#version: 0.2\nt h\nth e\nĠ the\nÃ ©\n"


def test_a_vocabulary_and_merges_of_qwen(tmp_path: Path) -> None:
    """As Qwen3-Omni and the first files of Qwen3-ASR have them, also of composed characters and of digits."""
    transformers = pytest.importorskip("transformers")
    write_qwen(tmp_path, PAIRS)
    found, expected = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the 123 the<|im_end|>The th", "é é it's\n\n  the", "中文😀 th"):
        assert found.encode(text) == expected(text).input_ids
        assert found.decode(found.encode(text), False) == unicodedata.normalize("NFC", text)
    assert (found.eos_token_ids, found.chat_template) == ((260,), "it")


@pytest.mark.parametrize(
    ("merges", "vocabulary"),
    [("t h e\n", None), ("t\n", None), ("t zz\n", None), ("", []), ("", {"a": "b"}), ("", {"a": -1}), ("", {})],
)
def test_a_damaged_vocabulary_of_qwen_is_refused(tmp_path: Path, merges: str, vocabulary: Any) -> None:
    write_qwen(tmp_path, merges, vocabulary)
    with pytest.raises(CheckpointError, match=r"merges\.txt|vocab\.json|added token"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match=r"merges\.txt|vocab\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}', "\udcff", "[" * 100_000])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)


TOO_LONG_FOR_INT = '{"added_tokens_decoder": {"%s": "a"}}' % ("1" * 5000)
NO_TEXT = r'{"added_tokens_decoder": {"262": "\ud800"}}'


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\udcff", NO_TEXT, TOO_LONG_FOR_INT])
def test_a_damaged_config_is_refused(tmp_path: Path, text: str) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("model", "unknown"),
    [
        (models.BPE({"a": 0, "b": 1}, [], unk_token="<unk>"), "'<unk>'"),
        (models.WordPiece({"a": 0, "b": 1}, unk_token="[UNK]"), "'[UNK]'"),
        (models.WordLevel({"a": 0, "b": 1}, unk_token="?"), "'?'"),
        (models.Unigram([("a", 0.0), ("b", 0.0)]), "None"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unknown_token_outside_the_vocabulary_is_refused(tmp_path: Path, model: Any, unknown: str) -> None:
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    message = rf"tokenizer.json: model.unk_token: the unknown token {re.escape(unknown)} is not in model.vocab"
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(tmp_path)


def test_an_unknown_token_that_no_text_needs_may_be_missing(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["unk_token"] = "<nowhere>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load(folder).encode("\U0010ffff\0\u0901 the", add_special_tokens=False)[-1] == 258
