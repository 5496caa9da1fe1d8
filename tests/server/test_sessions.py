"""Sessions of coding agents of forty turns: what each turn finds in the KV cache.

The requests have the shapes that Claude Code, Codex and OpenCode send (``agent_requests.json``), with texts of our own.
The server reads and renders them as it does all, and a real cache takes the tokens of each; the model's answers are
given. Nearly all of a turn and of its answer must be found in the next one, which repeats both: so what the model wrote
must be rendered as it was written, and nothing may come before it that changes.

With ``OCTAVO_SESSIONS`` in the environment, the figures are written to the file that it names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from octavo.cache.kv_cache import KVCache
from octavo.telemetry.cache_view import SessionOrder, SessionReport, SessionView
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.text.tool_calls.deepseek import BEGIN, END, SEPARATOR
from octavo.types import Request, Sequence
from octavo_bench.records.report import machine
from octavo_fleet.backends.vocabulary import byte_tokenizer
from tests.server import in_process
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.text.family_templates import FAMILIES

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 16, 8192, 1 << 16
TURNS = 40
INSTRUCTIONS = "You help in a workshop of bookbinders. Read what is there before you change it. " * 40
HELPER = "You count the leaves of sheets, and say nothing else. " * 40
NUM_TURNS = {"result": 25, "results": 10, "question": 4, "helper": 1}
FIGURES = {"result": "after_result", "results": "after_several", "question": "after_question"}
FIGURES["helper"] = "second_helper"
"""What the record calls the share of a kind of turn that is found."""
TOOLS = ("read_sheet", "write_sheet", "count_leaves", "sew")
PARAMETERS = {"type": "object", "properties": {"place": {"type": "string", "description": "Which sheet"}}}
RESULT = "Sheet {}: eight leaves, the third one torn at the fold; thread of linen, two stations."


class Model(NamedTuple):
    """What a model reads and writes: its template, and calls after text."""

    template: str
    call: Callable[[str, str], str]
    before_calls: str = ""
    """Between text, if there is any, and a call; and between calls."""
    parser: str = "auto"


MODELS = {
    "qwen 3": Model(
        FAMILIES["qwen 3"],
        lambda name, place: f'<tool_call>\n{{"name": "{name}", "arguments": {{"place": "{place}"}}}}\n</tool_call>',
        before_calls="\n",
    ),
    "deepseek": Model(
        FAMILIES["deepseek"],
        lambda name, place: f'{BEGIN}{name}{SEPARATOR}{{"place":"{place}"}}{END}',
        parser="deepseek_v31",
    ),
}
RECORD = os.environ.get("OCTAVO_SESSIONS")


class Turn(NamedTuple):
    """What a turn is, its tokens, and how many of them were found."""

    kind: str
    num_tokens: int
    num_before: int
    """Tokens of the turn before and of its answer."""
    num_said: int
    """Those of its answer alone."""
    num_found: int


class Cached(InProcessEngine):
    """Answers what is in ``said``, and keeps the tokens of each request in a cache."""

    def start(self, model: str = "qwen 3", tokenizer: Tokenizer | None = None) -> Cached:
        self.model, self.tokenizer = model, tokenizer or byte_tokenizer()
        self.answer = lambda request: [*self.tokenizer.encode(self.said), *self.tokenizer.eos_token_ids[-1:]]
        return self.again()

    def again(self) -> Cached:
        """With an empty cache."""
        self.said = ""
        self.requests.clear()
        self.cache = KVCache(NUM_BLOCKS, BLOCK_SIZE)
        return self

    def compute(self, request: Request) -> int:
        """Compute prompt and answer of a request as a scheduler does it; the number of tokens found."""
        seq = Sequence(request, order=(0,))
        self.cache.adopt(seq, self.cache.match(seq))
        num_found = seq.num_computed_tokens
        seq.tokens += self.answer(request)
        total = len(seq.tokens) - 1  # the last token is never computed
        assert self.cache.reserve(seq, total)
        self.cache.note_filled(total - num_found)
        seq.num_computed_tokens = total
        self.cache.publish(seq, total)
        self.cache.release(seq)
        return num_found


class Session:
    """A conversation in one dialect."""

    path = ""
    name, seconds = "", 0.0
    """Of the session, and for how long its prompts are to be kept, as the engine gets them."""

    def __init__(self, served: Served, engine: Cached, system: str = INSTRUCTIONS) -> None:
        self.served, self.engine, self.system = served, engine, system
        self.history: list[Any] = []
        self.turns: list[Turn] = []
        self._num_before = self._num_said = 0

    def ask(self, kind: str, text: str, calls: list[str]) -> list[tuple[str, str, str]]:
        """One turn, of which the model's answer is ``text`` and calls of a tool; their ids, names and arguments."""
        model = MODELS[self.engine.model]
        written = [model.call(TOOLS[number % 4], place) for number, place in enumerate(calls)]
        self.engine.said = model.before_calls.join(filter(None, [text, *written]))
        answer = self.served.client.post(self.path, json=self.body(), headers=self.headers())
        assert answer.status_code == 200, answer.text
        request = self.engine.requests[-1]
        assert (request.session, request.cache_ttl) == (self.name, self.seconds)
        sizes = len(request.prompt_tokens), self._num_before, self._num_said
        self.turns.append(Turn(kind, *sizes, self.engine.compute(request)))
        self._num_said = len(self.engine.answer(request))
        self._num_before = len(request.prompt_tokens) + self._num_said
        return self.take(answer)

    def headers(self) -> dict[str, str]:
        return {}

    def body(self) -> dict[str, Any]:
        raise NotImplementedError

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def take(self, answer: httpx.Response) -> list[tuple[str, str, str]]:
        """Add the answer to the history as the client does."""
        raise NotImplementedError

    def give(self, results: list[tuple[str, str]]) -> None:
        """Add the results of calls, by id."""
        raise NotImplementedError


class Claude(Session):
    """Claude Code: blocks with marks for the cache, the last of which moves on with each turn."""

    path = "/v1/messages"
    name, seconds = "1", 3600.0
    thinks: dict[str, Any] = {"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}

    def headers(self) -> dict[str, str]:
        return {"x-claude-code-session-id": "1", "anthropic-version": "2023-06-01"}

    def body(self) -> dict[str, Any]:
        messages = json.loads(json.dumps(self.history))
        messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        marked = {"type": "text", "text": self.system, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        tools = [{"name": name, "description": "A tool.", "input_schema": PARAMETERS} for name in TOOLS]
        own = {"model": "m", "max_tokens": 900, **self.thinks}
        return {**own, "system": [marked], "tools": tools, "messages": messages}

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": [{"type": "text", "text": text}]})

    def take(self, answer: httpx.Response) -> list[tuple[str, str, str]]:
        content = answer.json()["content"]
        self.history.append({"role": "assistant", "content": content})
        return [
            (block["id"], block["name"], json.dumps(block["input"])) for block in content if block["type"] == "tool_use"
        ]

    def give(self, results: list[tuple[str, str]]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        self.history.append({"role": "user", "content": blocks})


class ClaudeSilent(Claude):
    """Without ``thinking``, which turns it off."""

    thinks = {}


class Codex(Session):
    """Codex: items of the Responses API, all of them each time, as nothing is stored."""

    path = "/v1/responses"
    name = "1"

    def body(self) -> dict[str, Any]:
        tools = [
            {"type": "function", "name": name, "description": "A tool.", "parameters": PARAMETERS} for name in TOOLS
        ]
        own = {"prompt_cache_key": "1", "store": False, "parallel_tool_calls": True, "tool_choice": "auto"}
        return {"model": "m", "instructions": self.system, "tools": tools, "input": self.history, **own}

    def say(self, text: str) -> None:
        self.history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})

    def take(self, answer: httpx.Response) -> list[tuple[str, str, str]]:
        items = answer.json()["output"]
        self.history += items
        return [(x["call_id"], x["name"], x["arguments"]) for x in items if x["type"] == "function_call"]

    def give(self, results: list[tuple[str, str]]) -> None:
        self.history += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in results]


class OpenCode(Session):
    """OpenCode: chat completions."""

    path = "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        functions = [{"name": name, "description": "A tool.", "parameters": PARAMETERS} for name in TOOLS]
        tools = [{"type": "function", "function": function} for function in functions]
        messages = [{"role": "system", "content": self.system}, *self.history]
        return {"model": "m", "max_tokens": 900, "tool_choice": "auto", "tools": tools, "messages": messages}

    def take(self, answer: httpx.Response) -> list[tuple[str, str, str]]:
        message = answer.json()["choices"][0]["message"]
        kept = {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)}
        self.history.append({"content": "", **kept})
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
        return [(id, function["name"], function["arguments"]) for id, function in calls]

    def give(self, results: list[tuple[str, str]]) -> None:
        self.history += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in results]


def serve(folder: Path, model: str, tokenizer: Tokenizer | None = None) -> Served:
    (folder / "template").write_text(MODELS[model].template)
    engine = Cached(max_model_len=MAX_LEN).start(model, tokenizer)
    own = {"chat_template": str(folder / "template"), "tool_call_parser": MODELS[model].parser}
    return Served(engine, engine.tokenizer, {"served_model_name": "m", **own})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = serve(tmp_path_factory.mktemp("served"), "qwen 3")
    yield served
    served.stop()


@pytest.fixture(scope="module", params=["qwen 3", "deepseek", pytest.param("smollm2", marks=pytest.mark.model)])
def of_a_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tokens are bytes, but for SmolLM2, which has its own, with Qwen's template."""
    with pytest.MonkeyPatch.context() as patch:
        tokenizer, model = None, request.param
        if model == "smollm2":
            tokenizer, model = load_tokenizer(request.getfixturevalue("default_model_path")), "qwen 3"
            assert tokenizer is not None
            patch.setattr(in_process, "VOCAB", tokenizer.vocab_size)
        served = serve(tmp_path_factory.mktemp("served"), model, tokenizer)
        yield served
        served.stop()


@pytest.mark.slow
@pytest.mark.parametrize("agent", [Claude, ClaudeSilent, Codex, OpenCode])
def test_each_turn_of_an_agent_finds_the_one_before(
    of_a_model: Served, agent: type[Session], request: pytest.FixtureRequest
) -> None:
    """Two helpers with instructions of their own come in between; the second finds those of the first.

    Where it must not think, Qwen's template begins an answer with an empty thought that it leaves out of the history:
    so that answer is computed again, but nothing before it.
    """
    served, engine = of_a_model, of_a_model.engine
    assert isinstance(engine, Cached)
    engine.again()
    session, helpers = agent(served, engine), [agent(served, engine, HELPER) for _ in range(2)]
    session.say("Mend the third sheet.")
    kind = "first"
    for number in range(TURNS):
        if number in (10, 20):
            helpers[number // 20].say(f"Count the leaves of sheet {number}.")
            helpers[number // 20].ask("helper", "Eight.", [])
        is_last = number % 8 == 7
        places = [] if is_last else [f"{number}", f"{number}b"] if number % 4 == 2 else [f"{number}"]
        text = "The sheet is mended." if is_last else "" if number % 3 == 1 else f"I look at place {number}."
        calls = session.ask(kind, text, places)
        assert len(calls) == len(places)
        if calls:
            session.give([(id, RESULT.format(arguments)) for id, _, arguments in calls])
            kind = "results" if len(calls) > 1 else "result"
        else:
            session.say(f"Now sheet {number}.")
            kind = "question"
    rates: dict[str, list[float]] = {}
    for turn in session.turns[1:]:
        rates.setdefault(turn.kind, []).append(turn.num_found / turn.num_before)
    [turn] = helpers[1].turns
    rates["helper"] = [turn.num_found / turn.num_tokens]
    assert {kind: len(found) for kind, found in rates.items()} == NUM_TURNS
    lowest = {kind: round(min(found), 3) for kind, found in rates.items()}
    if RECORD is not None:
        note(Path(RECORD), agent.__name__, request.node.callspec.params["of_a_model"], rates, session.turns)
    if agent is ClaudeSilent:
        assert all(turn.num_found > turn.num_before - turn.num_said - 3 * BLOCK_SIZE for turn in session.turns[1:])
    else:
        assert all(rate >= 0.95 for rate in lowest.values()), lowest


def note(path: Path, agent: str, model: str, rates: dict[str, list[float]], turns: list[Turn]) -> None:
    """Add a session's figures to the record."""
    command = f"OCTAVO_SESSIONS={path} pytest tests/server/test_sessions.py"
    record = {"benchmark": "sessions", "date": time.strftime("%Y-%m-%d"), "command": command, "machine": machine()}
    kept = json.loads(path.read_text())["result"]["rows"] if path.exists() else []
    kept = [row for row in kept if (row["agent"], row["model"]) != (agent, model)]
    row: dict[str, Any] = {"agent": agent, "model": model, "prompt_tokens": turns[-1].num_tokens}
    row |= {f"{FIGURES[kind]}_percent": round(100 * min(found), 1) for kind, found in rates.items()}
    row["each_turn"] = [round(100 * turn.num_found / turn.num_before, 1) for turn in turns[1:]]
    path.write_text(json.dumps({**record, "result": {"rows": [*kept, row]}}, indent=2) + "\n")


def test_a_client_lets_go_of_its_session(served: Served) -> None:
    served.engine.session_orders.clear()
    answer = served.client.delete("/v1/sessions/1")
    assert answer.json() == {"id": "1", "object": "session", "deleted": True}
    assert served.engine.session_orders == [SessionOrder("forget", "", "1")]


def test_a_client_gives_a_hint_about_its_session(served: Served) -> None:
    engine: Any = served.engine
    engine.session_orders.clear()
    for is_taken in (False, True):
        engine.session_report = SessionReport(is_taken=is_taken)
        answer = served.client.post("/v1/sessions/a b/prefetch")
        assert answer.json() == {"id": "a b", "object": "session", "accepted": is_taken}
    assert engine.session_orders == [SessionOrder("prefetch", "", "a b")] * 2


def test_a_key_sees_its_own_sessions_and_the_admin_key_those_of_all(serve_app: Any, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {sha256(name.encode()).hexdigest()}\n" for name in ("alice", "bob")))
    engine = Cached()
    engine.session_report = SessionReport([SessionView("s", "alice", 2, 32, 16, 0, 16, 1.5, 0.0)])
    served = serve_app(engine, api_key_file=str(path), admin_key="boss")
    for key, owner in (("alice", "alice"), ("bob", "bob"), ("boss", None)):
        answer = served.client.get("/v1/sessions", headers={"Authorization": f"Bearer {key}"})
        assert engine.session_orders[-1] == SessionOrder("list", owner)
    assert answer.json()["data"] == [
        {
            "object": "session",
            "model": "test",
            "id": "s",
            "owner": "alice",
            "requests": 2,
            "tokens": 32,
            "cached_tokens": 16,
            "pinned_tokens": 0,
            "found_tokens": 16,
            "idle_seconds": 1.5,
            "pinned_seconds": 0.0,
        }
    ]
    assert served.client.get("/v1/sessions").status_code == 401
    bearer = {"Authorization": "Bearer boss"}
    assert served.client.delete("/v1/sessions/s", headers=bearer).status_code == 401, "it has no sessions of its own"
