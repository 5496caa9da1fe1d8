"""In-process speed: prompts of random ids, then decoding, at several numbers of sequences.

Model FLOPs utilisation (MFU) is the arithmetic that a model's tokens need, over what the device could do meanwhile.
Counted are two operations for each weight that a token is multiplied by, and those of attention over the tokens before
it; what an implementation computes more than that does not count. (The term is that of Chowdhery et al., "PaLM", 2022,
appendix B.)
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from octavo.build.build_engine import build_engine
from octavo.build.device_settings import resolve_device
from octavo.config import EngineConfig, to_flat
from octavo.engine.engine import Engine
from octavo.engine.runner.graph_dispatcher import PREPARING
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.system.garbage_collection import leave_out_what_exists
from octavo.types import EngineInfo, Output, Request
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.hub import resolve_model
from octavo_bench.records.report import Say, spreads
from octavo_fleet.sim.costs.devices import DEVICES
from octavo_fleet.sim.costs.roofline import Shape, decode_work, prefill_work, shape_of

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


def complete(engine: Engine, requests: Sequence[Request], after_step: Callable[[], object] = lambda: None) -> float:
    """Seconds until all are served. Raises ``ConfigError`` if a request fails, or gives another number of tokens."""
    for request in requests:
        engine.add(request)
    start, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(output.tokens) for output in checked_step(engine))
        after_step()
    seconds, wanted = time.perf_counter() - start, sum(request.max_tokens for request in requests)
    if tokens != wanted:
        raise ConfigError(f"{tokens} tokens were made, {wanted} were asked for")
    return seconds


def time_prefill(engine: Engine, requests: Sequence[Request]) -> float:
    """Prompt tokens per second of requests for one token each. Raises ``ConfigError`` if a request fails."""
    return sum(len(request.prompt_tokens) for request in requests) / complete(engine, requests)


@contextmanager
def decoding(engine: Engine, requests: Sequence[Request]) -> Iterator[None]:
    """Sequences that have all begun to decode, and are gone afterwards. Raises ``ConfigError`` if a request fails."""
    for request in requests:
        engine.add(request)
    started: set[int] = set()
    while len(started) < len(requests):
        started.update(output.request_id for output in checked_step(engine) if output.tokens)
    try:
        yield
    finally:
        for request in requests:
            engine.abort(request.id)
        while engine.has_work:
            engine.step()


def time_decode(engine: Engine, requests: Sequence[Request], steps: int) -> float:
    """Output tokens per second over ``steps`` steps in which every sequence advances by one token.

    Raises ``ConfigError`` if a request fails.
    """
    with decoding(engine, requests):
        start = time.perf_counter()
        tokens = sum(len(output.tokens) for _ in range(steps) for output in checked_step(engine))
        return tokens / (time.perf_counter() - start)


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


def data_sheet_peak(gpu: str) -> float | None:
    """Dense 16-bit TFLOP/s in the data sheet of the GPU that a driver calls ``gpu``; ``None`` if it is not known."""
    words = re.findall(r"[a-z0-9]+", gpu.lower())
    names = {*words, *map("".join, itertools.pairwise(words))}  # "RTX 4090" is rtx4090
    found = [device.peak for name, device in DEVICES.items() if name in names]
    return found[0] / 1e12 if found else None


def device_peak(device: str) -> float | None:
    """``data_sheet_peak`` of the first CUDA device; ``None`` for any other device."""
    if device != "cuda":
        return None
    import torch

    return data_sheet_peak(torch.cuda.get_device_name())


class Utilisation(NamedTuple):
    """Turns tokens per second into GFLOP/s of a model, and into a share of the device's."""

    shape: Shape | None
    """``None`` for a model whose arithmetic is not known here: there are no figures then."""
    peak: float | None
    """TFLOP/s of the device; ``None``: there is no share."""

    @classmethod
    def of(cls, config: EngineConfig, device: str, peak: float | None) -> Utilisation:
        """For the model of ``config``; ``peak`` is by default that of the device's data sheet."""
        checkpoint = open_checkpoint(resolve_model(config.model), config.model.load_format)
        try:
            shape = shape_of(checkpoint.config)
        except ConfigError:
            shape = None
        return cls(shape, device_peak(device) if peak is None else peak)

    def prefill(self, tok_s: float, prompt: int) -> Mapping[str, float]:
        """Of prompts of ``prompt`` tokens, at ``tok_s`` prompt tokens per second."""
        if self.shape is None:
            return {}
        return self._figures("prefill_", prefill_work(self.shape, prompt).flops * tok_s / prompt)

    def decode(self, tok_s: float, context: float) -> Mapping[str, float]:
        """Of decoding at a mean context of ``context`` tokens, at ``tok_s`` output tokens per second."""
        if self.shape is None:
            return {}
        return self._figures("decode_", decode_work(self.shape, 1, round(context)).flops * tok_s)

    def requests(self, requests_s: float, prompt: int, output: int) -> Mapping[str, float]:
        """Of whole requests; a prompt's step gives the first of the ``output`` tokens."""
        if self.shape is None:
            return {}
        decode = (output - 1) * decode_work(self.shape, 1, prompt + output // 2).flops
        return self._figures("", (prefill_work(self.shape, prompt).flops + decode) * requests_s)

    def _figures(self, name: str, flop_s: float) -> Mapping[str, float]:
        found = {f"{name}gflop_s": flop_s / 1e9}
        return found if self.peak is None else {**found, f"{name}mfu_percent": flop_s / 1e10 / self.peak}


def measure(
    config: EngineConfig,
    sequences: Sequence[int],
    prompt: int,
    decode: int,
    rounds: int,
    temperature: float,
    top_k: int,
    top_p: float,
    say: Say,
    peak: float | None = None,
) -> dict[str, Any]:
    """One row for each number of sequences. Raises ``ConfigError``, see ``OfflineBench.run``."""
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    bench = OfflineBench(bench_config(config, sequences), SamplingParams(**sampling, ignore_eos=True))
    used = Utilisation.of(config, bench.info.device, peak)
    rows = []
    for count in sequences:
        bench.run(count, prompt, 4)
        runs = [bench.run(count, prompt, decode) for _ in range(rounds)]
        for run in runs:
            run |= used.prefill(run["prefill_tok_s"], prompt)
            run |= used.decode(run["decode_tok_s"], prompt + decode / 2)
        memory = {"peak_memory_mib": round(peak_memory(bench.info.device) / 2**20, 1)}  # so far
        rows.append({"sequences": count, "prompt": prompt, "decode": decode, **spreads(runs), **memory})
        say(f"{count} sequences measured")
    return {**about_engine(config, bench.info), "peak_tflops": used.peak, "sampling": sampling, "rows": rows}


def without_prefix_cache(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, enable_prefix_caching=False))


def about_engine(config: EngineConfig, info: EngineInfo) -> dict[str, Any]:
    """What was measured: the model and how it was built."""
    names = ("dtype", "device", "max_num_seqs", "max_num_batched_tokens", "memory")
    told = {name: getattr(info, name) for name in names}
    model, held = Path(config.model.model).name, peak_memory(info.device)
    return {"model": model, **told, "peak_memory_bytes": held, "kernels": info.kernels}


def peak_memory(device: str) -> int:
    """The most bytes held so far: of the process on a CPU, of torch on a GPU."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_reserved()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
