"""A peer's own interpreter, loaded once and asked for one piece of work at a time; and several that share a load: one
client alone can be what limits a fast server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo_fleet.sim.closed_loops import ClosedLoopSpec

SCRIPTS = Path(__file__).parents[1] / "peers"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
NO_REPORTS = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def vllm_environment(python_path: str | None) -> dict[str, str]:
    """Ours, with nothing fetched and nothing reported; ``VLLM_*`` variables reach vLLM as they are."""
    path = {} if python_path is None else {"PYTHONPATH": python_path}
    return {**OFFLINE, **NO_REPORTS, **os.environ, **path}


class PeerProcess:
    """A script of ``peers/``: says who it is in one line of JSON, then answers each line with a line.

    ``errors`` is the file that its standard error goes to; by default it is shown. Raises ``ConfigError`` if it cannot
    be started.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, errors: Path | None = None
    ) -> None:
        with contextlib.ExitStack() as files:
            err = files.enter_context(errors.open("wb")) if errors else None
            pipe = subprocess.PIPE
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=err, env=env, text=True)
            except OSError as error:
                raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from None
        self.about: dict[str, Any] = self._read()

    def run(self, work: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Its answer to ``work``. Raises ``ConfigError`` when it ends, or takes more than ``seconds`` and is ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        timer = threading.Timer(seconds, self._process.kill) if seconds else None
        start = time.monotonic()
        if timer:
            timer.start()
        try:
            return self._read()
        except ConfigError as error:
            if seconds and time.monotonic() - start >= seconds:
                raise ConfigError(f"the work did not end in the {seconds:.0f} s that were left") from error
            raise
        finally:
            if timer:
                timer.cancel()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError("the peer ended without an answer; run its script by hand to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end by itself, or end it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(timeout=30)
        self._process.wait(timeout=30)


SAMPLES = {"ttft": "ttfts", "itl": "gaps", "tpot": "tpots"}
"""What figures are of, and where a client's answer has the seconds."""
PERCENTILES = {"median": 50, "p99": 99}

Start = Callable[[], PeerProcess]


class Clients:
    """Processes that send requests, such as ``vllm bench serve``; all begin at once."""

    def __init__(self, starts: Sequence[Start]) -> None:
        with ThreadPoolExecutor(len(starts)) as executor:  # each takes its time to import
            self.clients = list(executor.map(lambda start: start(), starts))
        self.about = self.clients[0].about

    def __len__(self) -> int:
        return len(self.clients)

    def run(self, arguments: Sequence[Sequence[str]], seconds: float) -> dict[str, Any]:
        """The result of a load, of which each client has the part that its arguments say. Raises ``ConfigError``."""
        answers = self.ask([{"arguments": part, "samples": len(self) > 1} for part in arguments], seconds)
        return answers[0] if len(answers) == 1 else together(answers)

    def ask(self, works: Sequence[Mapping[str, Any]], seconds: float) -> list[dict[str, Any]]:
        """Each client's answer to its part of the work, at the same time. Raises ``ConfigError``."""
        with ThreadPoolExecutor(len(self)) as executor:
            answers = list(executor.map(lambda client, work: client.run(work, seconds), self.clients, works))
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise ConfigError(f"the client failed: {errors[0]}")
        return answers

    def close(self) -> None:
        """Let them end."""
        for client in self.clients:
            client.close()


def share(load: ClosedLoopSpec, count: int) -> ClosedLoopSpec:
    """What each of ``count`` clients does of ``load``; raises ``ConfigError`` where that cannot be the same for all."""
    if load.prompts % count or load.concurrency % count:
        raise ConfigError(f"clients: {count} cannot share {load.prompts} prompts, {load.concurrency} at a time, evenly")
    return load._replace(prompts=load.prompts // count, concurrency=load.concurrency // count)


def together(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of all clients' requests, from the first one's start to the last one's end, in the client's names."""
    seconds = max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)
    sums = {
        name: sum(answer[name] for answer in answers)
        for name in ("completed", "total_input_tokens", "total_output_tokens", "chunks")
    }
    figures = {
        f"{label}_{name}_ms": 1e3 * float(np.percentile([s for answer in answers for s in answer[key]], percent))
        for name, key in SAMPLES.items()
        for label, percent in PERCENTILES.items()
    }
    return {
        **sums,
        **figures,
        "duration": seconds,
        "output_throughput": sums["total_output_tokens"] / seconds,
        "total_token_throughput": (sums["total_input_tokens"] + sums["total_output_tokens"]) / seconds,
        "first_errors": [error for answer in answers for error in answer["first_errors"]][:3],
    }
