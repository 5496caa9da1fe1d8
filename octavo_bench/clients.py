"""One client, or several at once that share a load: one alone can be what limits a fast server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from octavo.errors import ConfigError
from octavo_bench.peer_process import PeerProcess
from octavo_fleet.sim.closed_loops import ClosedLoopSpec

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
