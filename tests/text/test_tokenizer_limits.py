"""What a tokenizer of a checkpoint can take: memory and time to read it, growth of a text, tokens around a text."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from octavo.errors import CheckpointError, InvalidParameter
from octavo.system.child_process import ChildProcess
from octavo.text import tokenizer as tokenizer_module
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizers import tokenizer_check, tokenizer_limits
from octavo.text.tokenizers.tokenizer_limits import TextLimits
from octavo_fleet.backends.vocabulary import byte_tokenizer
from tests.text.test_folder_tokenizer import load, write_folder

SPECIAL = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT, OTHER = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
SPELL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}


def normalizer(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(single: list[Any], pair: list[Any] | None = None, ids: int = 1) -> dict[str, Any]:
    special = {"id": "<s>", "ids": [259] * ids, "tokens": ["<s>"] * ids}
    pair = [TEXT, OTHER] if pair is None else pair
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"<s>": special}}


def change(folder: Path, changes: dict[str, Any]) -> Path:
    whole = json.loads((write_folder(folder) / "tokenizer.json").read_text())
    whole["model"] |= changes.pop("model", {})
    (folder / "tokenizer.json").write_text(json.dumps(whole | changes))
    return folder


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - started < 5
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 256 << 20


LONGER = "can make a text more than 65536 times as long"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (normalizer(replace({"Regex": "."}, "b" * 70_000)), f"normalizer: {LONGER}"),
        (normalizer(replace({"String": "ab"}, "b" * 200_000)), f"normalizer: {LONGER}"),
        (normalizer(*[DOUBLE] * 28), f"normalizer: {LONGER}"),
        (normalizer(*[normalizer(*[DOUBLE] * 7)["normalizer"]] * 4), f"normalizer: {LONGER}"),
        (normalizer({"type": "Prepend", "prepend": "x" * 70_000}), f"normalizer: {LONGER}"),
        (normalizer(*[STRIP] * 300), "normalizer: has more than 256 steps"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPELL] * 30}}, f"pre_tokenizer: {LONGER}"),
        ({"post_processor": template([SPECIAL] * 1025 + [TEXT])}, "puts 1025 special tokens around a text"),
        ({"post_processor": template([TEXT], [*[SPECIAL] * 2000, TEXT, OTHER])}, "puts 2000 special tokens"),
        ({"post_processor": template([SPECIAL, TEXT], ids=3000)}, "puts 3000 special tokens"),
        ({"post_processor": template([TEXT, TEXT])}, "single: contains a text more than once"),
        ({"post_processor": template([TEXT], [TEXT, OTHER, TEXT])}, "pair: contains a text more than once"),
        (
            {"post_processor": {"type": "Sequence", "processors": [template([SPECIAL, TEXT])] * 1100}},
            "puts 1100 special tokens",
        ),
        (
            {"model": {"merges": [], "continuing_subword_prefix": "x" * 65}},
            "continuing_subword_prefix: has more than 64 characters",
        ),
        ({"model": {"end_of_word_suffix": "x" * 65}}, "end_of_word_suffix: has more than 64 characters"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "Cannot parse precompiled_charsmap"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}, "some texts cannot be encoded"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(tokenizer_check, "HARMLESS_BYTES", 1 << 30)
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: .*{message}"):
        load(change(tmp_path, dict(changes)))


def test_wordpiece_with_words_of_any_length() -> None:
    model = tokenizers.models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]", max_input_chars_per_word=10**9)
    with pytest.raises(CheckpointError, match="max_input_chars_per_word: is 1000000000; at most 1000"):
        TextLimits(tokenizers.Tokenizer(model), "a")


@pytest.mark.parametrize(
    "padding", [{"strategy": {"Fixed": 2**31}}, {"strategy": "BatchLongest", "pad_to_multiple_of": 2**31}]
)
def test_padding_of_any_length_is_off(tmp_path: Path, padding: dict[str, Any]) -> None:
    rest = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    assert len(load(change(tmp_path, {"padding": rest | padding})).encode("abc")) == 4


def test_the_usual_steps_are_allowed() -> None:
    charsmap = (8).to_bytes(4, "little") + bytes(8) + ("x" * 33).encode() + b"\0"
    assert tokenizer_limits._longest_replacement(charsmap) == 33
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    steps: list[Any] = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(), normalizers.NFC()]
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    TextLimits(backend, "a").check("x" * 1_000_000)


def test_every_step_of_the_library_has_a_factor() -> None:
    """One without is refused by name."""
    given = {"Replace", "Prepend", "Precompiled", "ByteLevel", "Sequence", "Normalizer", "PreTokenizer"}
    kinds = {name for module in (normalizers, pre_tokenizers) for name in dir(module) if name[0].isupper()}
    assert {kind for kind in kinds if not kind.isupper()} <= given | tokenizer_limits.GROWTH.keys()


def test_a_text_that_would_become_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_limits, "MAX_TEXT_BYTES", 100_000)
    tokenizer = load(change(tmp_path, normalizer(replace({"Regex": "z"}, "y" * 1000))))
    assert len(tokenizer.encode("a" * 40_000)) == 40_001  # which this normalizer leaves as it is
    assert len(tokenizer.encode("z" * 40)) == 40_001
    for text in ("z" * 60, "a" * 20_000 + "z" * 60, "a" * 60_000):
        with pytest.raises(InvalidParameter, match="too long for the model's tokenizer, which takes 50000 bytes"):
            tokenizer.encode(text)
    with pytest.raises(InvalidParameter, match="too long"):
        tokenizer.encode_pair("a", "z" * 60)


# --- the process ---


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every folder is read in a process; gives the modules that processes ran."""
    started: list[str] = []
    begin = tokenizer_check.ChildProcess

    def start(module: str, settings: dict[str, Any]) -> Any:
        started.append(module)
        return begin(module, settings)

    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer_check, "HARMLESS_BYTES", 0)
    monkeypatch.setattr(tokenizer_check, "ChildProcess", start)
    return started


def test_a_tokenizer_is_read_in_a_process_once(tmp_path: Path, watched: list[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_folder(folder)
    assert load(folder).encode("the") == load(folder).encode("the") == [259, 257]
    assert watched == [tokenizer_check.WORKER]
    write_folder(folder, config={"add_eos_token": True})
    load(folder)
    assert len(watched) == 2


def test_the_process_has_one_thread_whatever_the_number_of_processors(tmp_path: Path) -> None:
    """A thread for each of 64 processors took more addresses than the process may use."""
    with contextlib.closing(ChildProcess(tokenizer_check.WORKER, tokenizer_check.LIMITS)) as process:
        process.ask(str(write_folder(tmp_path)))
        assert len(list(Path(f"/proc/{process.id}/task").iterdir())) == 1


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_memory": 1 << 20}, r"cannot be read: it (used up its memory|needed more than 1 MiB)"),
        ({"max_seconds": 0.001}, r"cannot be read: it took more than 0\.001 seconds"),
    ],
)
def test_a_tokenizer_that_takes_too_much_is_refused(
    tmp_path: Path,
    watched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    limits: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(tokenizer_check, "LIMITS", tokenizer_check.LIMITS | limits)
    with pytest.raises(CheckpointError, match=message):
        load(write_folder(tmp_path))
    assert not (tmp_path / "cache").exists()


def test_the_process_says_what_is_wrong(tmp_path: Path, watched: list[str]) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.json: normalizer: {LONGER}"):
        load(change(tmp_path, normalizer(*[DOUBLE] * 28)))
    assert watched == [tokenizer_check.WORKER]


def test_a_long_text_is_encoded_no_further_than_the_context_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, encode, read = byte_tokenizer(), Tokenizer.encode, list[int]()

    def encode_and_note(self: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        read.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode_and_note)
    assert tokenizer.exceeds("\u00a0 " * 1_000_000, 100)
    assert read == [1 << 16]
    read.clear()
    assert not tokenizer.exceeds("a" * 800, 100)
    assert not read, "most texts of this length fit"
    monkeypatch.setattr(tokenizer_module, "FIRST_PART", 1)
    assert not tokenizer.exceeds("<|im_start|>" * 90, 100)  # a token for 12 characters
    assert tokenizer.exceeds("<|im_start|>" * 20 + "a" * 2000, 100)
    assert read == [200, 800, 200, 800]
