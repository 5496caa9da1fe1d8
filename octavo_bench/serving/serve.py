"""The measurement of ``octavo bench serve``: an OpenAI-compatible server that runs already, under given loads."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.errors import ConfigError
from octavo_bench.serving.http_client import HttpClient, TimedAnswer
from octavo_bench.serving.serve_figures import PERCENTILES, errors, figures
from octavo_bench.serving.serve_load import SERVING, Load, Prompts, Send, ServeWork, Target, apply, next_load
from octavo_fleet.sim.jobs import Job

CHAT_SHARE = 0.75
"""Of the context that words may fill: the chat template and words of more than one token need the rest."""


@dataclass(frozen=True)
class WantedFigures:
    """Which figures, of which loads."""

    loads: Sequence[Load]
    is_sweep: bool = False
    """Whether the last load is doubled until the throughput stops growing."""
    num_warmups: int = 1
    """Requests before each load that do not count."""
    percentiles: Sequence[float] = PERCENTILES
    goodput: dict[str, float] = field(default_factory=dict)
    """Milliseconds by metric."""
    serving: Sequence[str] = ()
    """Workloads that have loads of their own, in place of ``loads``."""


async def measure(
    target: Target, work: ServeWork, wanted: WantedFigures, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """One row for each load; ``keep`` gets the result after each. Raises ``ConfigError`` if no request succeeds."""
    client = HttpClient(target.url, target.endpoint, target.api_key, target.timeout)
    try:
        about, max_model_len = await about_server(client, target)
        work = replace(work, max_model_len=max_model_len)
        asked = {"workload": work.workload, "num_prompts": work.num_prompts, "seed": work.seed}
        result: dict[str, Any] = {**about, **asked, "goodput": wanted.goodput, "rows": []}
        pending = [(work, load) for load in wanted.loads] or [
            (replace(work, workload=name), SERVING[name].load) for name in wanted.serving
        ]
        done: list[Load] = []
        while pending:
            own, load = pending.pop(0)
            row = await _row(client, target, about["model"], own, load, wanted)
            result["rows"].append({"workload": own.workload, **row} if wanted.serving else row)
            done.append(load)
            keep(result)
            if wanted.is_sweep and not pending:
                throughputs = [row["output_tok_s"] for row in result["rows"]]
                following = next_load(done, throughputs, work.num_prompts)
                pending += [(work, following)] if following is not None else []
    finally:
        client.close()
    return result


async def _row(
    client: HttpClient, target: Target, model: str, work: ServeWork, load: Load, wanted: WantedFigures
) -> dict[str, Any]:
    def sender() -> Send:
        """Its prompts are in no cache of the server, whatever was sent before."""
        prompts = Prompts(target.endpoint, model, target.vocab_size, target.extra_body, secrets.token_hex(8))

        async def send(job: Job, answers: dict[int, TimedAnswer]) -> TimedAnswer:
            return await client.ask(prompts.body(job, answers))

        return send

    if wanted.num_warmups:
        one = Load(concurrency=wanted.num_warmups)
        await apply(one, replace(work, num_prompts=wanted.num_warmups).jobs(one), sender())
    answers, seconds = await apply(load, work.jobs(load), sender())
    found = {"load": str(load), **figures(answers, seconds, wanted.percentiles, wanted.goodput)}
    said = errors(answers)
    if not found["completed"]:
        reason = next(iter(said), f"no request fits into {work.max_model_len} tokens")
        raise ConfigError(f"serve: {load}: no request succeeded: {reason}")
    return {**found, "errors": said} if said else found


async def about_server(client: HttpClient, target: Target) -> tuple[dict[str, Any], int]:
    """What a record says of a server, and how many tokens a request may have. Raises ``ConfigError``."""
    listed = await client.get("v1/models")
    models = listed.get("data", []) if isinstance(listed, dict) else []
    if target.model is None and not models:
        raise ConfigError("model: the server lists none at /v1/models; --model names it")
    found = next((model for model in models if target.model in (None, model.get("id"))), {"id": target.model})
    most = int(found.get("max_model_len") or 1 << 30)
    about = {"url": target.url, "server": await client.get("version"), "model": str(found["id"])}
    return {**about, "endpoint": target.endpoint}, int(CHAT_SHARE * most) if target.endpoint == "chat" else most


def run(
    target: Target, work: ServeWork, wanted: WantedFigures, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """``measure`` on an event loop of its own: uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(measure(target, work, wanted, keep))
    return uvloop.run(measure(target, work, wanted, keep))
