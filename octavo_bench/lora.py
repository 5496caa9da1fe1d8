"""What adapters cost: a decode step of a batch whose sequences want none, one, or several of them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.step_runner import StepRunner
from octavo.models.model_adapters import HEAD, ModelAdapters
from octavo.runtime.executors.host_executor import HostExecutor
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_bench.report import spread

PROMPT_TOKENS = 16


def step_times(
    model: Path, folder: Path, counts: Sequence[int], num_seqs: int, rank: int, steps: int, rounds: int
) -> dict[int, list[float]]:
    """Milliseconds of decode steps by the number of adapters in the batch, 0 for none; numbers take turns in rounds.

    Weights are random, and so are adapters of every linear map of the layers, which are written to ``folder``.
    """
    values = {"model": str(model), "load_format": "dummy", "device": "cpu", "enable_lora": True}
    engine, _ = build_engine(
        EngineConfig.from_flat({**values, "max_num_seqs": num_seqs, "max_loras": max(counts) or 1})
    )
    assert isinstance(engine.runner, StepRunner)
    executor = engine.runner.executor
    assert isinstance(executor, HostExecutor)
    assert executor.adapters is not None
    for i in range(max(counts)):
        _write(executor.adapters, folder / str(i), rank)
        engine.adapters.load(str(i), str(folder / str(i)))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(rounds):
        for count in counts:
            times[count] += _step_ms(engine, count, num_seqs, steps)
    return times


def _write(adapters: ModelAdapters, folder: Path, rank: int) -> None:
    folder.mkdir(parents=True)
    tensors = {}
    for name, part in adapters.maps.items():
        if name != HEAD:
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, part.num_inputs) * 0.01
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(part.size, rank) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": rank}))


def _step_ms(engine: Engine, count: int, num_seqs: int, steps: int) -> list[float]:
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    for i in range(num_seqs):
        adapter = str(i % count) if count else ""
        prompt = [i + 1] * PROMPT_TOKENS
        engine.add(Request(i, prompt, params, steps, adapter=adapter, cache_salt=f"{count} {adapter}"))
    times = []
    while engine.has_work:
        started = time.perf_counter()
        outputs = engine.step()
        if sum(len(output.tokens) for output in outputs) == num_seqs:
            times.append(time.perf_counter() - started)
    return [seconds * 1e3 for seconds in times[len(times) // 4 :]]


def measure(model: Path, adapters: Sequence[int], sequences: int, rank: int, steps: int, rounds: int) -> dict[str, Any]:
    """A row for each number of adapters."""
    with tempfile.TemporaryDirectory() as folder:
        times = step_times(model, Path(folder), adapters, sequences, rank, steps, rounds)
    rows = [{"adapters": count, "step_ms": spread(ms), "least_ms": round(min(ms), 3)} for count, ms in times.items()]
    work = {"sequences": sequences, "rank": rank, "steps": steps, "rounds": rounds}
    return {"model": model.name, **work, "rows": rows}
