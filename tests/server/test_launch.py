"""``octavo launch``: an agent is told of its server, which begins and ends with it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.parser import EXIT_ERROR
from octavo_server.cli.launch import TOOLS, LaunchTarget
from tests.tiers import nightly_after

TARGET = LaunchTarget("http://127.0.0.1:9", "qwen/three", 40_000, "secret")
PROGRAM = """\
import json, os, sys, urllib.request
url = os.environ["ANTHROPIC_BASE_URL"]
body = {"model": sys.argv[2], "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
kind = {"content-type": "application/json"}
request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), kind)
answer = json.load(urllib.request.urlopen(request))
open("told.json", "w").write(json.dumps([url, sys.argv[1:], answer["usage"]["output_tokens"]]))
sys.exit(7)
"""
AGENT = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(PROGRAM)} "$@"\n'
"""The path of an interpreter may have spaces, which no line of #! takes."""


def launch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", "launch", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "XDG_CACHE_HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with an agent."""
    (tmp_path / "claude").write_text(AGENT)
    (tmp_path / "claude").chmod(0o755)
    return tmp_path


@pytest.mark.slow
def test_an_agent_has_a_server_as_long_as_it_works(program: Path) -> None:
    ended = launch(program, "claude", "bird", "--backend", "instant", "--", "-p", "say hi", PATH=str(program))
    assert ended.returncode == 7, ended.stderr
    url, arguments, num_tokens = json.loads((program / "told.json").read_text())
    assert arguments == ["--model", "bird", "-p", "say hi"]
    assert num_tokens == 4
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


@pytest.mark.slow
def test_why_a_server_does_not_start(program: Path) -> None:
    ended = launch(program, "claude", "/no/such/model", PATH=str(program))
    assert ended.returncode == EXIT_ERROR
    assert "the server did not start" in ended.stderr
    assert "/no/such/model" in ended.stderr


def test_a_tool_that_is_not_installed(tmp_path: Path) -> None:
    ended = launch(tmp_path, "codex", PATH=str(tmp_path))
    assert "codex is not installed: npm install -g @openai/codex" in ended.stderr
    assert ended.returncode == EXIT_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("rest", nightly_after(1, [["-p", "hi"], []]))
def test_what_is_behind_the_dashes_is_for_the_tool(rest: list[str], program: Path) -> None:
    """The server is missing, and nothing else is wrong."""
    ended = launch(program, "--url", "http://127.0.0.1:9", "claude", "--", *rest, PATH=str(program))
    assert "http://127.0.0.1:9 does not say which models it serves" in ended.stderr
    ended = launch(program, "--url", "http://127.0.0.1:9", "claude", "bird", "--", *rest, PATH=str(program))
    assert "'bird' has no effect" in ended.stderr


def test_help_needs_no_tool(tmp_path: Path) -> None:
    ended = launch(tmp_path, "codex", "--help", PATH=str(tmp_path))
    assert ended.returncode == 0
    assert "launch [--url URL] TOOL" in ended.stdout


def told(name: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    launched = TOOLS[name].settings(TARGET, folder)
    return list(launched.arguments), dict(launched.environment)


def test_what_agents_are_told(tmp_path: Path) -> None:
    arguments, environment = told("claude", tmp_path)
    assert arguments == ["--model", "qwen/three"]
    assert environment["ANTHROPIC_BASE_URL"] == TARGET.url
    assert environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "10000"
    arguments, environment = told("codex", tmp_path)
    assert arguments[::2] == ["-c"] * (len(arguments) // 2)
    settings = tomllib.loads("\n".join(arguments[1::2]))
    assert settings["model_providers"]["octavo"]["base_url"] == f"{TARGET.url}/v1"
    assert (settings["model"], settings["model_context_window"]) == ("qwen/three", 40_000)
    assert environment == {"OCTAVO_API_KEY": "secret"}
    _, environment = told("opencode", tmp_path)
    provider = json.loads(Path(environment["OPENCODE_CONFIG"]).read_text())["provider"]["octavo"]
    assert provider["options"] == {"baseURL": f"{TARGET.url}/v1", "apiKey": "secret"}
    assert provider["models"] == {"qwen/three": {"limit": {"context": 40_000, "output": 10_000}}}
    arguments, environment = told("aider", tmp_path)
    assert arguments == ["--model", "openai/qwen/three"]
    assert environment == {"OPENAI_API_BASE": f"{TARGET.url}/v1", "OPENAI_API_KEY": "secret"}
