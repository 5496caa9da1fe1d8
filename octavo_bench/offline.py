"""In-process throughput: prompts of random ids, then decoding, at several numbers of sequences."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Sequence

from octavo.build.build_engine import build_engine
from octavo.build.device_settings import resolve_device
from octavo.config import EngineConfig, to_flat
from octavo.engine.engine import Engine
from octavo.engine.graph_dispatcher import PREPARING
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.system.collector import leave_out_what_exists
from octavo.types import EngineInfo, Output, Request

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
CPU_STEP_TOKENS = 512
"""Tokens of a step on a CPU: throughput is measured, and nobody waits for a first token meanwhile."""


def wait_until_prepared() -> None:
    """Until no thread compiles kernels or captures graphs next to the steps of an engine of this process."""
    for thread in threading.enumerate():
        if thread.name == PREPARING:
            thread.join()


def build_prepared(config: EngineConfig) -> tuple[Engine, EngineInfo]:
    """An engine, once everything is there that is otherwise made beside its first steps: figures are of what lasts.

    Full collections look at what exists now no more than in a server's process, where they would hold up a step.
    """
    gc.unfreeze()  # an engine from before may go
    engine, info = build_engine(config)
    wait_until_prepared()
    leave_out_what_exists()
    return engine, info


def random_requests(
    count: int, prompt: int, max_tokens: int, vocab_size: int, first_id: int, seed: int, params: SamplingParams = GREEDY
) -> list[Request]:
    """Requests that share nothing."""
    rng = random.Random(seed)
    return [
        Request(first_id + i, [rng.randrange(vocab_size) for _ in range(prompt)], params, max_tokens)
        for i in range(count)
    ]


def checked_step(engine: Engine) -> list[Output]:
    """One step. Raises ``ConfigError`` for a request that fails, such as for want of memory: no figure may count it."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise ConfigError(f"a request failed: {output.error}")
    return outputs


def time_prefill(engine: Engine, requests: Sequence[Request]) -> float:
    """Prompt tokens per second, first token of each sequence included. Raises ``ConfigError`` if a request fails."""
    for request in requests:
        engine.add(request)
    start = time.perf_counter()
    while engine.has_work:
        checked_step(engine)
    return sum(len(request.prompt_tokens) for request in requests) / (time.perf_counter() - start)


def time_decode(engine: Engine, requests: Sequence[Request], steps: int) -> float:
    """Output tokens per second over ``steps`` steps in which every sequence advances by one token.

    Raises ``ConfigError`` if a request fails.
    """
    for request in requests:
        engine.add(request)
    started: set[int] = set()
    while len(started) < len(requests):
        started.update(output.request_id for output in checked_step(engine) if output.tokens)
    tokens = 0
    start = time.perf_counter()
    for _ in range(steps):
        tokens += sum(len(output.tokens) for output in checked_step(engine))
    seconds = time.perf_counter() - start
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
    return tokens / seconds


def check_fit(info: EngineInfo, sequences: int, length: int) -> None:
    """Raise ``ConfigError`` unless ``sequences`` of ``length`` tokens fit into the context, the batch and the cache."""
    if length > info.max_model_len:
        raise ConfigError(f"{length} tokens of a sequence are more than max_model_len, {info.max_model_len}")
    if sequences > info.max_num_seqs:
        raise ConfigError(f"{sequences} sequences are more than max_num_seqs, {info.max_num_seqs}")
    needed = sequences * -(-length // info.block_size)
    if needed > info.num_kv_blocks:
        raise ConfigError(
            f"{sequences} sequences of {length} tokens need {needed} blocks of the KV cache, there are "
            f"{info.num_kv_blocks}; raise num_kv_blocks or kv_cache_memory"
        )


class OfflineBench:
    """One loaded engine; each ``run`` measures one number of sequences once."""

    def __init__(self, config: EngineConfig, params: SamplingParams = GREEDY) -> None:
        """``params`` are those of every request; they should ignore the end of a text."""
        self._params = params
        self.engine: Engine
        self.info: EngineInfo
        self.engine, self.info = build_prepared(config)
        self.next_id = 1

    def run(self, sequences: int, prompt: int, decode: int) -> dict[str, float]:
        """Prefill and decode tokens per second, over all sequences together.

        Raises ``ConfigError`` when they do not fit at once: it would be waiting that is measured.
        """
        slack = -(-sequences * prompt // self.info.max_num_batched_tokens) + 2
        check_fit(self.info, sequences, prompt + decode + slack)
        prefill = time_prefill(self.engine, self._requests(sequences, prompt, 1))
        decoding = self._requests(sequences, prompt, decode + slack)
        return {"prefill_tok_s": prefill, "decode_tok_s": time_decode(self.engine, decoding, decode)}

    def _requests(self, count: int, prompt: int, max_tokens: int) -> list[Request]:
        first, self.next_id = self.next_id, self.next_id + count
        return random_requests(count, prompt, max_tokens, self.info.vocab_size, first, self.next_id, self._params)


def bench_config(config: EngineConfig, sequences: Sequence[int]) -> EngineConfig:
    """The given settings with a batch that holds the largest run, unless they say so, and no prefix cache to help."""
    values = to_flat(config)
    defaults = {"max_num_seqs": max(sequences)}
    if resolve_device(config.model.device).type == "cpu":
        defaults["max_num_batched_tokens"] = max(CPU_STEP_TOKENS, *sequences)
    chosen = {name: value for name, value in defaults.items() if values[name] is None}
    return EngineConfig.from_flat({**values, **chosen, "enable_prefix_caching": False})
