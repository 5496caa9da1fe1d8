"""Coding agents as they are published, each with turns in which it runs its own tools.

So small a model calls no tool that helps, so in most tests an engine writes calls that were given beforehand. The
agent, its requests, the server's API and what the agent does with the calls are real.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.types import Request
from octavo_server.cli.launch import TOOLS
from tests.clients.conftest import FOLDER, MODEL
from tests.conftest import Server, start_server
from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer

CONTEXT = 65_536
LONG = {
    "max_position_embeddings": CONTEXT,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
}
"""The first request of Claude Code has 20,000 tokens, and the model was made for 8,192."""
OUTPUT = 256
"""Most tokens that the model writes in a turn, where the agent asks for no other number."""
DONE = "All is done."
PATCH = "*** Begin Patch\n*** Update File: a.txt\n@@\n-hello\n+bye\n*** End Patch"

Turn = str | tuple[str, dict[str, Any]]
"""A text, or the name and the arguments of a call."""


class Agent(NamedTuple):
    """An agent's program, and what it is made to do."""

    command: Sequence[str]
    """In the clients' folder; ``{url}`` is the server's."""
    settings: Mapping[str, str]
    """Variables of its environment."""
    files: Mapping[str, str]
    """Files in its home with their texts."""
    turns: Sequence[Turn]
    """What the model writes in each turn; ``{folder}`` is where the agent works."""
    counted: str = "<tool_response>\n"
    """What the prompt has once more in each turn: a result of a tool, as the model's template has no tools."""
    stdin: str = ""


CODEX_SETTINGS = f"""
model = "{MODEL}"
model_provider = "octavo"
[model_providers.octavo]
name = "Octavo"
base_url = "{{url}}/v1"
wire_api = "responses"
"""
SCRIPT = "text(JSON.stringify(await tools.exec_command({{cmd: '{}'}})))"
"""Of a model that Codex knows it wants scripts: text for a custom tool, which it offers as an item of the input."""
OPENCODE_SETTINGS = {
    "autoupdate": False,
    "share": "disabled",
    "model": f"octavo/{MODEL}",
    "small_model": f"octavo/{MODEL}",
    "provider": {
        "octavo": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{url}/v1", "apiKey": "none"},
            "models": {MODEL: {"limit": {"context": CONTEXT, "output": OUTPUT}}},
        }
    },
}
GEMINI_SETTINGS = {
    "general": {"disableAutoUpdate": True},
    "privacy": {"usageStatisticsEnabled": False},
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "tools": {"core": ["read_file", "replace", "run_shell_command", "write_file", "list_directory"]},
}
"""With fewer tools than it has: it gives up after 60 s without a token, and 8,300 are left for the model to read."""
GEMINI_EDIT = {"instruction": "Say goodbye", "old_string": "hello", "new_string": "bye"}
EDIT = "I edit.\n\na.txt\n```\n<<<<<<< SEARCH\n{}\n=======\n{}\n>>>>>>> REPLACE\n```\n"
STEP = "Step number"
WORDS = ("hello", "one", "two", "three", "four", "bye")
AGENTS = {
    "claude": Agent(
        [
            *("node_modules/.bin/claude", "-p", "Change a.txt.", "--model", MODEL),
            *("--allowedTools", "Bash Edit Write Read"),
        ],
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "none",
            "API_TIMEOUT_MS": "800000",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(OUTPUT),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        {},
        [
            ("Read", {"file_path": "{folder}/a.txt"}),
            ("Edit", {"file_path": "{folder}/a.txt", "old_string": "hello", "new_string": "bye"}),
            ("Bash", {"command": "cat a.txt", "description": "Show the file"}),
            ("Write", {"file_path": "{folder}/b.txt", "content": "new"}),
            ("Bash", {"command": "ls", "description": "List the files"}),
        ],
    ),
    "codex": Agent(
        [
            *("node_modules/.bin/codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "Change a.txt."),
        ],
        {},
        {".codex/config.toml": CODEX_SETTINGS},
        [
            ("exec_command", {"cmd": "cat a.txt"}),
            ("exec_command", {"cmd": f"apply_patch <<'EOF'\n{PATCH}\nEOF"}),
            ("multi_agent_v1__close_agent", {"target": "none"}),  # of a namespace: the agent answers that there is none
            ("exec_command", {"cmd": "printf new > b.txt"}),
            ("get_goal", {}),
        ],
    ),
    "codex_custom": Agent(
        [
            *("node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--model", "gpt-6.2-sol"),
            *("--dangerously-bypass-approvals-and-sandbox", "Change a.txt."),
        ],
        {},
        {".codex/config.toml": CODEX_SETTINGS},
        [
            ("functions__exec", {"input": SCRIPT.format("cat a.txt")}),
            ("functions__exec", {"input": SCRIPT.format("echo bye > a.txt")}),
            ("collaboration__list_agents", {}),
            ("functions__exec", {"input": SCRIPT.format("printf new > b.txt")}),
            ("functions__exec", {"input": SCRIPT.format("ls")}),
        ],
    ),
    "gemini": Agent(
        [
            *("node_modules/.bin/gemini", "--model", MODEL, "--skip-trust", "--approval-mode", "yolo"),
            *("--prompt", "Change a.txt."),
        ],
        {"GOOGLE_GEMINI_BASE_URL": "{url}", "GEMINI_API_KEY": "none"},
        {".gemini/settings.json": json.dumps(GEMINI_SETTINGS)},
        [
            ("read_file", {"file_path": "{folder}/a.txt"}),
            ("replace", {**GEMINI_EDIT, "file_path": "{folder}/a.txt"}),
            ("run_shell_command", {"command": "cat a.txt", "description": "Show the file"}),
            ("write_file", {"file_path": "{folder}/b.txt", "content": "new"}),
            ("list_directory", {"dir_path": "{folder}"}),
        ],
    ),
    "opencode": Agent(
        ["node_modules/.bin/opencode", "run", "Change a.txt."],
        {"OPENCODE_DISABLE_AUTOUPDATE": "1"},
        {".config/opencode/opencode.json": json.dumps(OPENCODE_SETTINGS)},
        [
            ("read", {"filePath": "{folder}/a.txt"}),
            ("edit", {"filePath": "{folder}/a.txt", "oldString": "hello", "newString": "bye"}),
            ("bash", {"command": "cat a.txt", "description": "Show the file"}),
            ("write", {"filePath": "{folder}/b.txt", "content": "new"}),
            ("bash", {"command": "ls", "description": "List the files"}),
        ],
    ),
    "gptme": Agent(
        ["gptme/bin/gptme", "--non-interactive", "--tool-format", "tool", "-m", f"local/{MODEL}", "Change a.txt."],
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none"},
        {},
        [
            ("shell", {"command": "cat a.txt"}),
            ("patch", {"path": "a.txt", "patch": "<<<<<<< ORIGINAL\nhello\n=======\nbye\n>>>>>>> UPDATED"}),
            ("save", {"path": "b.txt", "content": "new"}),
            ("shell", {"command": "cat a.txt"}),
            ("shell", {"command": "ls"}),
        ],
    ),
    "aider": Agent(
        [
            *("aider/bin/aider", "--model", f"openai/{MODEL}", "--edit-format", "diff", "--yes-always", "--no-git"),
            *("--no-fancy-input", "--no-pretty", "--analytics-disable", "--no-check-update"),
            *("--no-show-model-warnings", "--no-show-release-notes", "a.txt"),
        ],
        {"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        {},
        ["I wait.", *(EDIT.format(*pair) for pair in itertools.pairwise(WORDS))],
        counted=STEP,
        stdin="".join(f"{STEP} {place}.\n" for place in range(1, 7)),
    ),
}


def filled(value: Any, **places: object) -> Any:
    """``value`` with the places that its texts name in braces."""
    if isinstance(value, str):
        for name, place in places.items():
            value = value.replace(f"{{{name}}}", str(place))
        return value
    return {key: filled(member, **places) for key, member in value.items()}


def scripted(agent: Agent, folder: Path) -> InProcessEngine:
    """An engine that writes the agent's turns; a prompt without tools asks for a title."""
    tokenizer = byte_tokenizer()
    has_tools = any(isinstance(turn, tuple) for turn in agent.turns)

    def answer(request: Request) -> list[int]:
        prompt = tokenizer.decode(request.prompt_tokens, False)
        place = prompt.count(agent.counted)
        turn = agent.turns[place] if place < len(agent.turns) else DONE
        if has_tools and "<tools>" not in prompt:
            turn = "A title"
        if isinstance(turn, tuple):
            called = {"name": turn[0], "arguments": filled(turn[1], folder=folder)}
            turn = f"I call it.\n<tool_call>\n{json.dumps(called)}\n</tool_call>"
        return [*turn.encode(), IM_END]

    return InProcessEngine(answer, max_model_len=1 << 20)


@pytest.fixture
def work(tmp_path: Path) -> Callable[..., str]:
    """Let an agent work in a folder with one file; returns what it printed."""

    def work(agent: Agent, url: str, folder: Path, may_give_up: bool = False) -> str:
        program = FOLDER / agent.command[0]
        if not program.exists():
            pytest.skip(f"{program} is not installed")
        home = tmp_path / "home"
        for name, text in agent.files.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(filled(text, url=url))
        ended = subprocess.run(
            [str(program), *(filled(part, url=url) for part in agent.command[1:])],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(home), **filled(agent.settings, url=url)},
            input=agent.stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=800,
        )
        assert may_give_up or ended.returncode == 0, ended.stdout[-8000:]
        return ended.stdout

    return work


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    (made / "a.txt").write_text("hello\n")
    subprocess.run(["git", "init", "-q"], cwd=made, check=True)
    return made


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_runs_its_tools(name: str, folder: Path, work: Callable[..., str]) -> None:
    agent = AGENTS[name]
    served = Served(scripted(agent, folder), byte_tokenizer(), {"served_model_name": MODEL, "accept_any_model": True})
    try:
        assert DONE in work(agent, served.url, folder)
        assert len(served.engine.requests) >= len(agent.turns)
    finally:
        served.stop()
    assert (folder / "a.txt").read_text() == "bye\n"
    assert name == "aider" or (folder / "b.txt").read_text().strip() == "new"


@pytest.mark.parametrize("name", TOOLS)
def test_an_agent_works_as_it_is_launched(name: str, folder: Path, work: Callable[..., str]) -> None:
    """`octavo launch` tells it of the server, and nothing else does."""
    program, *arguments = AGENTS[name].command
    if not (FOLDER / program).exists():
        pytest.skip(f"{program} is not installed")
    if "--model" in arguments:
        del arguments[(place := arguments.index("--model")) : place + 2]
    launch = [sys.executable, "-m", "octavo", "launch", "--url", "{url}", name, "--", *arguments]
    path = f"{(FOLDER / program).parent}{os.pathsep}{os.environ['PATH']}"
    agent = AGENTS[name]._replace(command=launch, settings={"PATH": path, "PYTHONPATH": os.getcwd()}, files={})
    served = Served(scripted(agent, folder), byte_tokenizer(), {"served_model_name": MODEL})
    try:
        assert DONE in work(agent, served.url, folder)
        assert len(served.engine.requests) >= len(agent.turns)
    finally:
        served.stop()
    assert (folder / "a.txt").read_text() == "bye\n"


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model with a context that an agent's first request fits."""
    sampling = tmp_path_factory.mktemp("sampling")
    (sampling / "generation_config.json").write_text(json.dumps({"max_new_tokens": OUTPUT}))
    arguments = ("--max-model-len", str(CONTEXT), "--hf-overrides", json.dumps(LONG))
    server = start_server(MODEL, *arguments, "--generation-config", str(sampling), "--accept-any-model")
    yield server
    server.stop()


GEMINI = ("/v1beta/models/{model:path}:generateContent", "/v1beta/models/{model:path}:streamGenerateContent")
ANSWERS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", *GEMINI)


def answered(server: Server) -> Counter[str]:
    """How many requests for answers there were, by kind of status."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            if sample.name == "http_requests_total" and sample.labels["handler"] in ANSWERS:
                found[sample.labels["status"]] += int(sample.value)
    return found


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_takes_what_the_model_writes(
    name: str, long_server: Server, folder: Path, work: Callable[..., str]
) -> None:
    """It may give up, as an answer of so small a model helps it nowhere and is cut; every request is answered."""
    before = answered(long_server)
    printed = work(AGENTS[name], long_server.url, folder, may_give_up=True)
    after = answered(long_server) - before
    assert after["2xx"] > 0, printed
    assert after.keys() == {"2xx"}, printed
