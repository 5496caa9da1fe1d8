"""What serving costs: decoding through the HTTP server beside the same work in this process, and how long a user waits
from `octavo serve` to ready, and to the first token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx

from octavo.cli.settings import setting_flags
from octavo.config import EngineConfig
from octavo_bench.offline import OfflineBench, bench_config, random_requests
from octavo_bench.report import spreads
from octavo_bench.server_process import serve_octavo
from octavo_bench.stream_reader import Ask, Streamed, completion, read_streams


def measure(config: EngineConfig, sequences: Sequence[int], prompt: int, decode: int, rounds: int) -> dict[str, Any]:
    """One row for each number of sequences: output tokens/s of both, in turns, and the median of served / in-process.

    Both count only while all sequences decode. The client, and the server's front, share this machine's processors.
    """
    config = bench_config(config, sequences)
    ours, rows = OfflineBench(config), list[dict[str, Any]]()
    with serve_octavo(config.model.model, *setting_flags(config)) as server:
        server.wait_ready()
        for count in sequences:
            slack = -(-count * prompt // ours.info.max_num_batched_tokens) + 2
            pairs = []
            for turn in range(rounds + 1):  # the first is not counted
                asked = random_requests(count, prompt, decode + slack, ours.info.vocab_size, 0, turn)
                asks = [Ask(0.0, completion(request.prompt_tokens, request.max_tokens)) for request in asked]
                inside = ours.run(count, prompt, decode)["decode_tok_s"]
                pairs.append((inside, decode_rate(read_streams(server.port, asks), decode + slack)))
            inside, outside = (statistics.median(column) for column in zip(*pairs[1:], strict=True))
            row = {
                "sequences": count,
                "in_process_tok_s": round(inside, 1),
                "served_tok_s": round(outside, 1),
                "ratio": round(statistics.median(b / a for a, b in pairs[1:]), 3),
                "pairs": [[round(a, 1), round(b, 1)] for a, b in pairs[1:]],
            }
            rows.append(row)
    return {"model": config.model.model, "rows": rows}


def decode_rate(streams: Sequence[Streamed], tokens: int) -> float:
    """Tokens per second from when the last stream began until the first ended; each has ``tokens`` in all.

    A token that completes no character has no event of its own, so a stream's events count in proportion.
    """
    begin, end = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    count = sum(sum(begin < time <= end for time in stream.times) * tokens / len(stream.times) for stream in streams)
    return count / (end - begin)


TIMEOUT = 300.0


def start_once(arguments: Sequence[str]) -> dict[str, float]:
    """Start a server, wait until it is ready, ask for one token, stop it. All in seconds from the start."""
    start = time.perf_counter()
    with serve_octavo(*arguments) as server:
        ready = server.wait_ready()
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        httpx.post(server.url + "/v1/completions", json=body, timeout=TIMEOUT).raise_for_status()
        return {"ready_s": ready, "first_answer_s": time.perf_counter() - start}


def measure_startup(model: str, rounds: int) -> dict[str, Any]:
    """Several starts."""
    return {"model": model, **spreads([start_once([model]) for _ in range(rounds)])}
