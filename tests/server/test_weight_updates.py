"""Weights that change under the streams of a real model, in folders as trainers write them."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.config import ServeConfig
from octavo.types import Output, Request, TokenLogprobs
from octavo_server.engines.async_engine import AsyncEngine
from tests.llm.test_weight_updates import changed
from tests.llm.tiny import write_checkpoint
from tests.models.families import make_checkpoint
from tests.server.child_engine import Recorder, until
from tests.server.forked_engine import THREADED
from tests.tiers import nightly

NUM_STREAMS, MAX_TOKENS = 64, 1000
SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_kv_blocks": 8200, "max_num_seqs": NUM_STREAMS}
SETTINGS |= {"max_model_len": MAX_TOKENS + 8, "max_num_batched_tokens": 256}


class Scored(Recorder):
    """Keeps the log-probabilities, too."""

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[TokenLogprobs] = []

    def on_output(self, output: Output) -> None:
        self.logprobs += output.logprobs or []
        super().on_output(output)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Two models that differ in their weights; the second is weights alone, as prime-rl writes them."""
    make_checkpoint(write_checkpoint(tmp_path / "a"), "llama/gqa", vocab_size=264, max_position_embeddings=2048)
    changed(tmp_path / "a", tmp_path / "b")
    for path in (tmp_path / "b").iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    return tmp_path / "a", tmp_path / "b"


async def updated(engine: AsyncEngine, folders: tuple[Path, Path], num_updates: int) -> list[tuple[Request, Scored]]:
    """Streams, while which the weights become those of the second folder, of the first again, and so on; as far as they
    are some tokens after the last update."""
    streams = []
    for number in range(NUM_STREAMS):
        params = SamplingParams(temperature=0.9, seed=number, logprobs=0, ignore_eos=True)
        request = Request(engine.next_id(), [number + 1, 7, number + 3], params, MAX_TOKENS)
        streams.append((request, Scored()))
        engine.add(*streams[-1])
    for version in range(1, num_updates + 2):
        least = min(len(recorder.tokens) for _, recorder in streams)
        await until(lambda least=least: min(len(recorder.tokens) for _, recorder in streams) > least)
        if version <= num_updates:
            await engine.update_weights(str(folders[version % 2]), str(version))
    assert all(recorder.finish_reason is None for _, recorder in streams)
    for request, _ in streams:
        engine.abort(request.id)
    return streams


@pytest.mark.parametrize("num_updates", [4, nightly(20)])
def test_each_token_is_that_of_a_fresh_start_with_the_version_that_it_names(
    folders: tuple[Path, Path], num_updates: int
) -> None:
    """Scoring a whole text with the weights of a version gives the log-probabilities, to the bit, of the part that was
    sampled with it."""

    async def main() -> list[tuple[Request, Scored]]:
        own = {"model": str(folders[0]), "weight_updates_dir": str(folders[0].parent)}
        engine = AsyncEngine(ServeConfig.from_flat({**SETTINGS, **own}), THREADED)
        await engine.start()
        try:
            return await updated(engine, folders, num_updates)
        finally:
            await engine.stop(0)

    streams = asyncio.run(main())
    texts = [[*request.prompt_tokens, *recorder.tokens] for request, recorder in streams]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scores = []
    for folder in folders:
        with LLM(str(folder), **SETTINGS, hf_config_path=str(folders[0]), tokenizer=str(folders[0])) as fresh:
            scores.append([result.prompt_logprobs or [] for result in fresh.generate(texts, params)])
    num_different = num_tokens = 0
    for number, (request, recorder) in enumerate(streams):
        assert [version for version, _ in recorder.weights] == [str(each) for each in range(1, num_updates + 1)]
        places = [("0", 0), *recorder.weights, ("", len(recorder.tokens))]
        num_tokens += len(recorder.tokens)
        for (version, start), (_, end) in itertools.pairwise(places):
            for position in range(start, end):
                token, place = recorder.tokens[position], len(request.prompt_tokens) + position
                found = [(own[number][place] or {})[token].logprob for own in scores]
                assert recorder.logprobs[position].logprob == found[int(version) % 2], (number, position)
                num_different += found[0] != found[1]
    assert num_different > 0.9 * num_tokens, "else it would not show which weights they were"
