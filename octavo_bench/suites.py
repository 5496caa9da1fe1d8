"""Suites of measurements in this process: one answer alone, many together, uneven ones, and with too little memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.config import EngineConfig, to_flat
from octavo.engine.engine import Engine
from octavo.errors import ConfigError
from octavo.types import EngineInfo, Request
from octavo_bench.figure_table import meaning
from octavo_bench.offline import build_prepared, checked_step, random_requests
from octavo_bench.report import spread
from octavo_bench.suite_sizes import SuiteSizes

SHORT_PROMPT = 10
Row = dict[str, Any]


def row(sizes: SuiteSizes, suite: str, case: object, values: Sequence[float], **more: Any) -> Row:
    """A figure, beside the published one if there is one, and how many times better it is."""
    figure = spread(values)
    found: Row = {"suite": suite, "case": str(case), "value": figure, **more}
    published = sizes.published.get(suite, {}).get(str(case))
    if published is not None:
        times = figure["median"] / published
        times = times if meaning(suite).better == "more" else 1 / times
        found |= {"published": published, "times_better": round(times, 3)}
    return found


class Bench:
    """One engine, and requests for it with ids of their own."""

    def __init__(self, config: EngineConfig, **changes: Any) -> None:
        self.engine: Engine
        self.info: EngineInfo
        settings = {**to_flat(config), "enable_prefix_caching": False, **changes}
        self.engine, self.info = build_prepared(EngineConfig.from_flat(settings))
        self.next_id = 1

    def requests(self, count: int, prompt: int, output: int) -> list[Request]:
        first, self.next_id = self.next_id, self.next_id + count
        return random_requests(count, prompt, output, self.info.vocab_size, first, seed=first)

    def run(self, requests: Sequence[Request]) -> tuple[float, int]:
        """Seconds until all are served, and the most blocks in use on the way. Raises ``ConfigError``."""
        wanted = sum(request.max_tokens for request in requests)
        start = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        found, most = 0, 0
        while self.engine.has_work:
            found += sum(len(output.tokens) for output in checked_step(self.engine))
            most = max(most, self.engine.stats().num_used_blocks)
        seconds = time.perf_counter() - start
        if found != wanted:
            raise ConfigError(f"{found} tokens were made, {wanted} were asked for")
        return seconds, most

    def timed(self, count: int, prompt: int, output: int, rounds: int) -> list[float]:
        """Seconds of each round, after one that does not count."""
        self.run(self.requests(count, prompt, min(output, 8)))
        return [self.run(self.requests(count, prompt, output))[0] for _ in range(rounds)]


def alone_and_together(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """Latency of one answer, tokens per second of one and of many, and the memory of keys and values."""
    bench = Bench(config, max_num_seqs=max(sizes.batches))
    for prompt in sizes.prompts:
        yield row(sizes, "latency s", prompt, bench.timed(1, prompt, sizes.output, rounds))
    for output in sizes.outputs:
        seconds = bench.timed(1, SHORT_PROMPT, output, rounds)
        yield row(sizes, "throughput tok/s", output, [output / each for each in seconds])
    for count in sizes.batches:
        seconds = bench.timed(count, SHORT_PROMPT, sizes.output, rounds)
        yield row(sizes, "batch tok/s", count, [count * sizes.output / each for each in seconds])
    info = bench.info
    per_block = info.memory["kv_cache"] / info.num_kv_blocks
    for count in sizes.batches:
        _, most = bench.run(bench.requests(count, SHORT_PROMPT, sizes.output))
        paged = info.memory["weights"] + most * per_block
        whole = info.memory["weights"] + count * info.max_model_len / info.block_size * per_block
        yield row(
            sizes,
            "memory ratio",
            count,
            [whole / paged],
            paged_mib=round(paged / 2**20),
            whole_mib=round(whole / 2**20),
        )


def uneven(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """Answers of uneven lengths, a few at a time: batches that are refilled step by step beside such as are not."""
    for policy, name in (("static", "static"), ("fcfs", "continuous")):
        yield row(sizes, "continuous tok/s", name, _uneven(config, sizes, rounds, policy))


def _uneven(config: EngineConfig, sizes: SuiteSizes, rounds: int, policy: str) -> list[float]:
    """Tokens per second of each round. The engine goes with the call, and its memory, which the next one needs."""
    bench = Bench(config, max_num_seqs=sizes.places, scheduling_policy=policy)
    bench.timed(sizes.places, SHORT_PROMPT, 8, 1)
    values = []
    for _ in range(rounds):
        requests = bench.requests(sizes.uneven, SHORT_PROMPT, sizes.output)
        lengths = [sizes.output * (1 + i * 8 // (sizes.uneven - 1)) // 5 for i in range(sizes.uneven)]
        mixed = [lengths[i * 7 % sizes.uneven] for i in range(sizes.uneven)]
        changed = [
            Request(request.id, request.prompt_tokens, request.params, length)
            for request, length in zip(requests, mixed, strict=True)
        ]
        values.append(sum(mixed) / bench.run(changed)[0])
    return values


def pressed(config: EngineConfig, sizes: SuiteSizes, rounds: int) -> Iterator[Row]:
    """More answers together than there are blocks for: nobody fails, and who has to wait is counted."""
    block_size = 16
    each = -(-(SHORT_PROMPT + sizes.output) // block_size)
    for share in (1, 4):
        length = max(SHORT_PROMPT + sizes.output, sizes.pressed // share * each * block_size)
        blocks = max(sizes.pressed // share, 1) * each
        limits = {"max_model_len": min(length, 512), "num_kv_blocks": blocks, "block_size": block_size}
        values, preemptions = _pressed(config, sizes, rounds, limits)
        yield row(sizes, "pressure tok/s", f"{blocks} blocks", values, preemptions=preemptions)


def _pressed(config: EngineConfig, sizes: SuiteSizes, rounds: int, limits: dict[str, int]) -> tuple[list[float], int]:
    """Tokens per second of each round, and preemptions; as for ``_uneven``, the engine goes with the call."""
    bench = Bench(config, max_num_seqs=sizes.pressed, **limits)
    seconds = bench.timed(sizes.pressed, SHORT_PROMPT, sizes.output, rounds)
    return [sizes.pressed * sizes.output / one for one in seconds], bench.engine.stats().num_preemptions
