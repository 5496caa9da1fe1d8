"""Two real models, of random weights, that take turns in memory for one."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from octavo.build.build_engine import build_engine
from octavo.config import ServeConfig
from octavo.sampling_params import SamplingParams
from octavo.types import Request
from octavo_fleet.several_models import GIB, ModelGroup
from tests.models.families import make_checkpoint
from tests.server.child_engine import Recorder, finish

pytestmark = pytest.mark.slow

PROMPTS = ([1, 2, 3], [7] * 20)


def alone(config: ServeConfig) -> tuple[list[list[int]], int]:
    """The greedy continuations of the prompts, by an engine in this process, and the bytes that it reserves."""
    engine, info = build_engine(config)
    tokens: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(number, prompt, SamplingParams(temperature=0.0), 12))
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.tokens
    engine.close()
    return list(tokens.values()), sum(info.memory.values())


def test_models_that_take_turns_answer_as_each_does_alone(tmp_path: Path) -> None:
    configs, wanted, sizes = [], [], []
    for row in ("llama/gqa", "llama/biases"):
        make_checkpoint(tmp_path / row, row)
        configs.append(ServeConfig.from_flat({"model": str(tmp_path / row), "kv_cache_memory": 0.1, "device": "cpu"}))
        answers, size = alone(configs[-1])
        wanted.append(answers)
        sizes.append(size)
    assert wanted[0] != wanted[1]
    budget = sum(sizes) - 1

    async def main() -> None:
        bound = dataclasses.replace(configs[0].server, models_memory_budget=budget / GIB)
        group = ModelGroup([dataclasses.replace(config, server=bound) for config in configs])
        await group.start()
        try:
            assert [engine.sleep_level for engine in group.engines] == [0, 1]
            for number in (0, 1):
                streams = []
                for prompt in PROMPTS:
                    engine = group.engines[number]
                    request = Request(engine.next_id(), prompt, SamplingParams(temperature=0.0), 12)
                    streams.append((request, Recorder()))
                    engine.add(*streams[-1])
                await finish(streams)
                assert [recorder.tokens for _, recorder in streams] == wanted[number]
                assert [bool(each.sleep_level) for each in group.engines] == [number == 1, number == 0]
                assert 0 < group.num_bytes <= budget
        finally:
            await group.stop(0)

    asyncio.run(main())
