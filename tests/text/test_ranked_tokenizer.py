"""Tokenizers whose strings are stored by rank: Mistral's tekken.json and Kimi's tiktoken.model."""

from __future__ import annotations

import base64
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ModelSettings
from octavo.errors import CheckpointError
from octavo.text.chat_template import load_chat_template
from octavo.text.conversation import Conversation
from octavo.text.tokenizer import Tokenizer, load_tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
PLAIN = re.compile(r"[^\r\nA-Za-z0-9é]?[A-Za-zé]+|[0-9]| ?[^\sA-Za-z0-9é]+|\s+")
"""The same for the texts of these tests."""
WORDS = ["the", " the", " then", "ing", " thing", "é", " été", "aaaa", "ab", "bab", "abab", "12", "--", "  ", "\n"]
NUM_SPECIAL = 40
MORE = ("[CALL_ID]", "[ARGS]", "[AUDIO]", "[BEGIN_AUDIO]")


def ranks_of(words: list[str]) -> dict[bytes, int]:
    """All bytes, and pairs that occur most in the words, one behind the other."""
    strings = [bytes([byte]) for byte in range(256)]
    parts = [[bytes([byte]) for byte in word.encode()] for word in words]
    while len(strings) < 300:
        counts: dict[bytes, int] = {}
        for word in parts:
            for left, right in itertools.pairwise(word):
                counts[left + right] = counts.get(left + right, 0) + 1
        counts = {string: count for string, count in counts.items() if string not in strings}
        if not counts:
            break
        strings.append(max(counts, key=lambda string: (counts[string], string)))
        known = {string: rank for rank, string in enumerate(strings)}
        parts = [merged(b"".join(word), known) for word in parts]
    return {string: rank for rank, string in enumerate(strings)}


def merged(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The strings of a word: the neighbours of the lowest rank become one, again and again."""
    if word in ranks:
        return [word]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks[parts[i] + parts[i + 1]], i) for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in ranks]
        if not pairs:
            return parts
        _, place = min(pairs)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


RANKS = ranks_of(WORDS)


def tekken(version: str = "v11", special: tuple[str, ...] | None = MORE, **config: Any) -> dict[str, Any]:
    older = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    older += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"]
    older += ["[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(string).decode(), "token_str": None}
        for string, rank in {**RANKS, b"left out": len(RANKS)}.items()
    ]
    known: dict[str, Any] = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(entries),
        "default_vocab_size": len(RANKS) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": version,
    }
    values: dict[str, Any] = {"config": {**known, **config}, "vocab": entries}
    if special is not None:
        values["special_tokens"] = [
            {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate([*older, *special])
        ]
    return values


def loaded(folder: Path, values: dict[str, Any]) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(values))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def texts(count: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(count):
        yield "".join(rng.choice([*WORDS, "a", "b", "t", " ", "h", "\u4e00"]) for _ in range(rng.randrange(30)))


def expected(text: str, first: int) -> list[int]:
    return [first + RANKS[part] for word in PLAIN.findall(text) for part in merged(word.encode(), RANKS)]


@pytest.mark.parametrize(("version", "special"), [("v3", None), ("v7", None), ("v11", MORE)])
def test_tokens_are_those_of_merging_by_rank(tmp_path: Path, version: str, special: tuple[str, ...] | None) -> None:
    tokenizer = loaded(tmp_path, tekken(version, special))
    for text in texts(300):
        ids = tokenizer.encode(text)
        assert ids == [1, *expected(text, NUM_SPECIAL)]
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids_by_text()["[TOOL_CONTENT]"] == 19
    assert tokenizer.special_ids_by_text()["<SPECIAL_39>"] == 39
    assert tokenizer.encode("[INST]a</s>", add_special_tokens=False) == [3, NUM_SPECIAL + 97, 2]


def test_kimis_special_tokens_are_behind_the_others(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(string).decode()} {rank}" for string, rank in RANKS.items()]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(RANKS)
    config: dict[str, Any] = {
        "tokenizer_class": "TikTokenTokenizer",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(first): {"content": "[BOS]", "special": True},
            str(first + 1): {"content": "[EOS]", "special": True},
            str(first + 5): {"content": "<|im_middle|>", "special": True},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    for text in texts(100):
        ids = tokenizer.encode(text)
        assert first not in ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("the<|im_middle|>then") == [*tokenizer.encode("the"), first + 5, *tokenizer.encode("then")]
    assert tokenizer.special_ids_by_text()[f"<|reserved_token_{first + 255}|>"] == first + 255
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "QWenTokenizer"}))
    with pytest.raises(CheckpointError, match=r"tokenizer_class is 'QWenTokenizer'"):
        load_tokenizer(tmp_path)


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
TOLD = f"[AVAILABLE_TOOLS][{json.dumps(TOOL)}][/AVAILABLE_TOOLS]"
CALLS = [
    {"id": f"abcdefgh{n}", "type": "function", "function": {"name": "f", "arguments": f'{{"x": {n}}}'}} for n in (1, 2)
]
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A"},
    {"role": "user", "content": "R"},
]
USE: list[dict[str, Any]] = [
    *TALK[:2],
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "one"},
    {"role": "tool", "tool_call_id": "abcdefgh2", "content": "two"},
]
BY_NAME = (
    '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefgh1"}, '
    '{"name": "f", "arguments": {"x": 2}, "id": "abcdefgh2"}]</s>'
)
WITH_IDS = (
    "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]one[/TOOL_RESULTS][TOOL_RESULTS]abcdefgh2[TOOL_CONTENT]two[/TOOL_RESULTS]"
)
PROMPTS = {
    "v3": (
        f"<s>[INST]Q[/INST]A</s>{TOLD}[INST]S\n\nR[/INST]",
        f"<s>{TOLD}[INST]S\n\nQ[/INST]{BY_NAME}"
        '[TOOL_RESULTS]{"content": "one", "call_id": "abcdefgh1"}[/TOOL_RESULTS]'
        '[TOOL_RESULTS]{"content": "two", "call_id": "abcdefgh2"}[/TOOL_RESULTS]',
    ),
    "v7": (
        f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Q[/INST]A</s>{TOLD}[INST]R[/INST]",
        f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{TOLD}[INST]Q[/INST]{BY_NAME}{WITH_IDS}",
    ),
    "v11": (
        f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Q[/INST]A</s>{TOLD}[INST]R[/INST]",
        f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{TOLD}[INST]Q[/INST]"
        '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"x": 1}[TOOL_CALLS]f[CALL_ID]abcdefgh2[ARGS]{"x": 2}</s>' + WITH_IDS,
    ),
    "v13": (
        f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{TOLD}[INST]Q[/INST]A</s>[INST]R[/INST]",
        f"<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT]{TOLD}[INST]Q[/INST]"
        '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{"x": 2}</s>'
        "[TOOL_RESULTS]one[/TOOL_RESULTS][TOOL_RESULTS]two[/TOOL_RESULTS]",
    ),
}
"""As mistral-common 1.13 writes them, a talk with tools and a call of them."""


@pytest.mark.parametrize("version", PROMPTS)
def test_prompts_of_a_folder_without_a_template(tmp_path: Path, version: str) -> None:
    tokenizer = loaded(tmp_path, tekken(version))
    template = load_chat_template(ModelSettings(model=str(tmp_path)), tokenizer)
    try:
        for messages, prompt in zip((TALK, USE), PROMPTS[version], strict=True):
            assert Conversation(messages, template, [TOOL]).prompt().text == prompt
        (tmp_path / "chat_template.jinja").write_text("own")
        own = load_tokenizer(tmp_path)
        assert own is not None
        assert own.chat_template == "own"
    finally:
        template.close()


def _without_vocab(values: dict[str, Any]) -> None:
    del values["vocab"]


def _twice(values: dict[str, Any]) -> None:
    values["vocab"][5] = values["vocab"][6]


def _gap(values: dict[str, Any]) -> None:
    values["vocab"][5]["rank"] = 10_000


def _too_many(values: dict[str, Any]) -> None:
    values["special_tokens"].append({"rank": NUM_SPECIAL, "token_str": "x", "is_control": True})


def _says(**wrong: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values["config"].update(wrong)


@pytest.mark.parametrize(
    "damage",
    [
        *(_without_vocab, _twice, _gap, _too_many, lambda values: values.pop("special_tokens")),
        *(_says(version="x"), _says(pattern="("), _says(pattern=3), _says(default_vocab_size=10)),
        *(_says(default_num_special_tokens=10**9), _says(default_vocab_size="x")),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    values = tekken()
    damage(values)
    with pytest.raises(CheckpointError, match=r"tekken\.json"):
        loaded(tmp_path, values)
    (tmp_path / "tekken.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"tekken\.json"):
        load_tokenizer(tmp_path)
