"""``octavo launch TOOL [MODEL] [options of serve] [-- ARGUMENTS]``: a server, and a coding agent that works with it.

The agent is told of the server by its environment, its arguments or a file beside its own settings, which stay as they
are. The server ends with the agent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.cli.terminal import note
from octavo.config import cache_dir
from octavo.errors import ConfigError, OctavoError

NAME = "launch"
HELP = "start a coding agent (claude, codex, opencode, aider) with a server of its own"

POLL_SECONDS = 0.1
STOP_SECONDS = 50.0
"""More than a server takes to end its requests, and to write cached blocks to its disk."""
MOST_OUTPUT = 32_000
LOG_LINES = 15


class LaunchTarget(NamedTuple):
    """The server that an agent is told of."""

    url: str
    model: str
    context: int
    """The longest context of the model, in tokens."""
    api_key: str = "none"

    @property
    def max_output(self) -> int:
        """Tokens that an agent may ask for in a turn, so that most of the context is left for what came before."""
        return min(MOST_OUTPUT, max(1, self.context // 4))


class Launched(NamedTuple):
    """How an agent is started."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = {}


def _claude(target: LaunchTarget, folder: Path) -> Launched:
    return Launched(
        ["--model", target.model],
        {
            "ANTHROPIC_BASE_URL": target.url,
            "ANTHROPIC_API_KEY": target.api_key,
            "ANTHROPIC_SMALL_FAST_MODEL": target.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.max_output),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(target: LaunchTarget, folder: Path) -> Launched:
    values = {
        "model": target.model,
        "model_provider": "octavo",
        "model_context_window": target.context,
        "model_providers.octavo.name": "Octavo",
        "model_providers.octavo.base_url": f"{target.url}/v1",
        "model_providers.octavo.env_key": "OCTAVO_API_KEY",
        "model_providers.octavo.wire_api": "responses",
    }
    # A value is TOML, in which strings are written as in JSON.
    arguments = [part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value)}")]
    return Launched(arguments, {"OCTAVO_API_KEY": target.api_key})


def _opencode(target: LaunchTarget, folder: Path) -> Launched:
    model = f"octavo/{target.model}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Octavo",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.api_key},
        "models": {target.model: {"limit": {"context": target.context, "output": target.max_output}}},
    }
    file = folder / "opencode.json"
    file.write_text(json.dumps({"model": model, "small_model": model, "provider": {"octavo": provider}}))
    return Launched((), {"OPENCODE_CONFIG": str(file)})


def _aider(target: LaunchTarget, folder: Path) -> Launched:
    environment = {"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.api_key}
    return Launched(["--model", f"openai/{target.model}"], environment)


class Agent(NamedTuple):
    """A coding agent."""

    settings: Callable[[LaunchTarget, Path], Launched]
    """What it is told; files go to the folder."""
    install: str


TOOLS = {
    "claude": Agent(_claude, "npm install -g @anthropic-ai/claude-code"),
    "codex": Agent(_codex, "npm install -g @openai/codex"),
    "opencode": Agent(_opencode, "npm install -g opencode-ai"),
    "aider": Agent(_aider, "pip install aider-chat"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The tool; what is behind it belongs to the server, and behind ``--`` to the tool."""
    parser.usage = f"{parser.prog} [--url URL] TOOL [MODEL] [options of octavo serve] [-- arguments of the tool]"
    parser.add_argument("--url", help="a server that runs already; none is started")
    parser.add_argument("--api-key", default="none", help="key of the server of --url")
    # One argument for all of it: behind another one, argparse drops the "--" that follows at once.
    tool_help = f"{', '.join(TOOLS)}; behind it MODEL and options, as for octavo serve"
    parser.add_argument("tool", nargs=argparse.PARSER, metavar="TOOL", choices=tuple(TOOLS), help=tool_help)
    parser.set_defaults(show_help=parser.print_help)


def run(args: argparse.Namespace) -> int:
    """Start both; return the exit status of the tool."""
    name, *rest = args.tool
    tool, program = TOOLS[name], shutil.which(name)
    place = rest.index("--") if "--" in rest else len(rest)
    for_server, for_tool = rest[:place], rest[place + 1 :]
    if {"-h", "--help"} & {*for_server}:
        args.show_help()
        return 0
    if program is None:
        raise ConfigError(f"{name} is not installed: {tool.install}")
    if args.url is not None and for_server:
        raise ConfigError(
            f"--url names a server that runs already, so that {' '.join(for_server)!r} has no effect; "
            "arguments of the tool are behind --"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the server, too
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="octavo-launch-")))
        url = cleanup.enter_context(_server(for_server)) if args.url is None else args.url.rstrip("/")
        launched = tool.settings(_target(url, args.api_key), folder)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tool decides what Ctrl-C means
        cleanup.callback(signal.signal, signal.SIGINT, before)
        environment = {**os.environ, **launched.environment}
        ended = subprocess.run([program, *launched.arguments, *for_tool], env=environment, preexec_fn=_with_interrupts)
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def _with_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _server(arguments: Sequence[str]) -> Iterator[str]:
    """The URL of a server that runs within the block. Raises ``OctavoError`` if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = cache_dir() / "launch.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "octavo", "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    note(f"starting the server; its log is {log}")
    with log.open("wb") as output:
        # A group of its own: Ctrl-C is for the tool.
        server = subprocess.Popen(command, stdout=output, stderr=output, process_group=0)
    try:
        url = f"http://127.0.0.1:{port}"
        while _get(f"{url}/ready") is None:
            if server.poll() is not None:
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                raise OctavoError("the server did not start:\n" + "\n".join(lines))
            time.sleep(POLL_SECONDS)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _target(url: str, api_key: str) -> LaunchTarget:
    """Raises ``OctavoError``."""
    found = _get(f"{url}/v1/models", api_key)
    if not found or not found.get("data"):
        raise OctavoError(f"{url} does not say which models it serves; is it a server, and --api-key its key?")
    model = found["data"][0]
    return LaunchTarget(url, model["id"], model.get("max_model_len") or 8192, api_key)


def _get(url: str, api_key: str = "none") -> dict[str, Any] | None:
    """The JSON object at a URL; ``None`` if there is none."""
    try:
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"})
        with urllib.request.urlopen(request, timeout=10) as response:
            found = json.load(response)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else {}
