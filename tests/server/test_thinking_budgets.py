"""Hundreds of requests with bounds on their reasoning at once, through a real engine with and without drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import tokenizers

from octavo.config import ServeConfig
from octavo.text.tokenizers.token_bytes import byte_level_alphabet
from tests.models.drafter_files import mtp
from tests.models.families import make_checkpoint
from tests.server.threaded_server import ThreadedServer
from tests.tiers import nightly_after

pytestmark = pytest.mark.slow  # real engines

END, OPENS, CLOSES = 256, 257, 258
SPECIAL = {END: "<|end|>", OPENS: "<think>", CLOSES: "</think>"}
VOCAB_SIZE = 264
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if opens %}<think>{% endif %}{# </think> #}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "word": {"enum": ["a", "bc", "ü"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["word", "counts"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
KINDS: list[dict[str, Any]] = [
    {},
    {"response_format": FORMAT},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"response_format": FORMAT, "tools": [TOOL]},
]
REST_OF_CHARACTER = 3
"""Tokens of a byte each without which a text is not UTF-8: a grammar does not have it end inside a character."""
ROOM = 150
"""Tokens that suffice for any answer that matches the schema, as call or content."""


def write_model(folder: Path, has_tokens: bool) -> Path:
    """A model of random weights; its marks of reasoning are tokens, or texts of a token for each byte."""
    alphabet = byte_level_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(sorted(alphabet, key=alphabet.__getitem__))}
    special = SPECIAL if has_tokens else {END: SPECIAL[END]}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary | {text: id for id, text in special.items()}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special.values()])
    tokenizer.save(str(folder / "tokenizer.json"))
    details = {"eos_token": SPECIAL[END], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(details))
    return folder


def settings_of(folder: Path, drafts: str) -> dict[str, Any]:
    (folder / "model").mkdir()
    changes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "eos_token_id": END}
    if drafts == "mtp":
        mtp(folder / "model", "deepseek_v3/groups", "deepseek", **changes)
    else:
        make_checkpoint(folder / "model", "llama/gqa", **changes)
    write_model(folder / "model", has_tokens=drafts != "text")
    config: dict[str, Any] = {"method": drafts, "num_speculative_tokens": 3, "adaptive": False}
    if drafts == "draft_model":
        make_checkpoint(folder / "draft", "qwen3/wide_heads", **changes)
        config["model"] = str(folder / "draft")
    own = {} if drafts in ("", "text") else {"speculative_config": config}
    sizes = {"num_kv_blocks": 400, "block_size": 16, "max_num_batched_tokens": 256, "max_num_seqs": 32}
    return {"model": str(folder / "model"), "served_model_name": "tiny", "device": "cpu", **sizes, **own}


class Asked(NamedTuple):
    """A request, and what is known of its answer."""

    body: dict[str, Any]
    budget: int | None
    is_inside: bool


def is_bound(body: dict[str, Any]) -> bool:
    """Whether all that may come behind the reasoning matches the schema."""
    return "response_format" in body or body.get("tool_choice") == "required"


def some_request(rng: random.Random, closes: int | None) -> Asked:
    budget, kind, is_inside = rng.choice([0, 1, 7, 20, 40, None]), rng.choice(KINDS), rng.random() < 0.7
    bias = dict.fromkeys(map(str, b" \t\r\n"), -100)  # blanks of a grammar, without an end
    bias |= {} if closes is None else {str(closes): rng.choice([-5, 2, 4]), str(OPENS): rng.choice([-5, 3, 8])}
    own = {} if budget is None else {"thinking_token_budget": budget}
    body = {
        "messages": [{"role": "user", "content": "".join(rng.choices("abü ", k=rng.randrange(1, 20)))}],
        "max_tokens": (budget or 0) + (ROOM if is_bound(kind) else 15),
        "temperature": rng.choice([0.7, 1.0]),
        "seed": rng.randrange(1000),
        "n": rng.choice([1, 1, 1, 3]),
        "logit_bias": bias,
        "stream": rng.random() < 0.5,
        "return_token_ids": True,
        "chat_template_kwargs": {"opens": is_inside},
        **kind,
        **own,
    }
    return Asked(body, budget, is_inside)


class Answer(NamedTuple):
    """A choice, put together from the pieces of a stream if it was one."""

    tokens: list[int]
    reasoning: str
    content: str
    calls: list[dict[str, Any]]
    finish_reason: str


def pieces_of(served: ThreadedServer, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Of each choice its messages, one unless they are streamed."""
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n") if body["stream"] else [f"data: {answer.text}"]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    frames = [json.loads(text) for text in data if text != "[DONE]"]
    choices = [choice for frame in frames for choice in frame["choices"]]
    return [[choice for choice in choices if choice["index"] == index] for index in range(body["n"])]


def answer_of(pieces: list[dict[str, Any]]) -> Answer:
    """The whole answer; nothing of the reasoning comes behind anything of the answer."""
    tokens, reasoning, content, calls, has_begun = list[int](), "", "", list[dict[str, Any]](), False
    for piece in pieces:
        message = piece.get("delta") or piece.get("message") or {}
        tokens += piece.get("token_ids") or []
        thought = message.get("reasoning_content") or ""
        assert not (thought and has_begun), "reasoning behind content"
        reasoning, content = reasoning + thought, content + (message.get("content") or "")
        for call in message.get("tool_calls") or []:
            place = call.get("index", len(calls))
            if place == len(calls):
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[place]["arguments"] += call["function"]["arguments"]
        has_begun = bool(content.strip() or calls)
    return Answer(tokens, reasoning, content, calls, pieces[-1]["finish_reason"])


def num_thought(tokens: list[int], is_inside: bool) -> int:
    """Tokens between marks that are tokens, as far as reasoning goes on without anything but blanks between."""
    count = 0
    for token in tokens:
        if token in (OPENS, CLOSES):
            is_inside = token == OPENS
        elif is_inside:
            count += 1
        elif not bytes([token] if token < END else b"x").isspace():
            return count
    return count


def check(asked: Asked, answer: Answer, has_tokens: bool) -> None:
    body, budget = asked.body, asked.budget
    if budget is not None:
        thought = num_thought(answer.tokens, asked.is_inside) if has_tokens else len(answer.reasoning.encode())
        assert thought <= (budget if has_tokens else 3 * budget) + REST_OF_CHARACTER
    if not is_bound(body) or (budget is None and answer.finish_reason == "length"):
        return
    assert answer.finish_reason in ("stop", "tool_calls"), "the schema leaves no more room"
    assert answer.calls or body.get("tool_choice") != "required"
    for text in [call["arguments"] for call in answer.calls] or [answer.content]:
        jsonschema.validate(json.loads(text), SCHEMA)


NUMBERS = nightly_after(4, [("ngram", 500), ("text", 60), ("draft_model", 60), ("mtp", 60), ("", 500)])


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThreadedServer]:
    served = ThreadedServer(ServeConfig.from_flat(settings_of(tmp_path, request.param)))
    yield served
    served.stop()


@pytest.mark.parametrize(("served", "count"), NUMBERS, indirect=["served"])
def test_any_bound_holds_with_any_form_of_answer(served: ThreadedServer, count: int, request: Any) -> None:
    drafts = request.node.callspec.params["served"]
    rng = random.Random(drafts)
    asked = [some_request(rng, None if drafts == "text" else CLOSES) for _ in range(count)]
    with ThreadPoolExecutor(24) as threads:
        found = list(threads.map(lambda each: pieces_of(served, each.body), asked))
    answers = [(each, answer_of(pieces)) for each, choices in zip(asked, found, strict=True) for pieces in choices]
    for each, answer in answers:
        check(each, answer, has_tokens=drafts != "text")
    bound = [answer for each, answer in answers if each.budget and answer.reasoning]
    assert any(answer.tokens.count(CLOSES) for answer in bound) is (drafts != "text")
    assert sum(bool(answer.content or answer.calls) for answer in bound) > len(bound) // 2
    stats = served.engine.stats
    assert bool(stats.num_accepted_drafts) is (drafts not in ("", "text"))
