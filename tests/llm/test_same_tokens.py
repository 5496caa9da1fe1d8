"""Settings that change how tokens are computed give the tokens of the plain engine, one setting at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.types import EngineStats
from tests.llm.tiny import MAX_MODEL_LEN, SETTINGS

pytestmark = pytest.mark.usefixtures("all_cores")

PLAIN: dict[str, Any] = {**SETTINGS, "block_size": 16, "enable_prefix_caching": False}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,  # else the number of drafts depends on measured times
}
Said = list[list[int]]


def prompts_that_begin_alike() -> list[list[int]]:
    """Prompts with a long common prefix that ends anywhere in a block."""
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(90)]
    return [[*shared[: rng.randrange(20, 90)], *(rng.randrange(256) for _ in range(9))] for _ in range(8)]


def said(model: Path, params: SamplingParams, **settings: Any) -> tuple[Said, EngineStats]:
    """The output of an engine with these settings: for the first prompt alone, then for all."""
    prompts = prompts_that_begin_alike()
    with LLM(model, **settings) as llm:
        first = llm.generate([prompts[0]], params)
        others = llm.generate(prompts, params)
        llm.engine.check()
        return [list(result.outputs[0].token_ids) for result in [*first, *others]], llm.engine.stats()


GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.02, seed=5, max_tokens=30)


@pytest.fixture(scope="module")
def plainly(tiny_checkpoint: Path) -> dict[float, Said]:
    return {params.temperature: said(tiny_checkpoint, params, **PLAIN)[0] for params in (GREEDY, RANDOM)}


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_blocks_reused_in_part(tiny_checkpoint: Path, plainly: dict[float, Said], params: SamplingParams) -> None:
    settings = {**SETTINGS, "block_size": 16}
    with_parts, stats = said(tiny_checkpoint, params, **settings)
    without, whole_only = said(tiny_checkpoint, params, **settings, enable_partial_reuse=False)
    assert with_parts == without == plainly[params.temperature]
    assert stats.num_copied_tokens > 0 == whole_only.num_copied_tokens
    assert stats.prefix_hits > whole_only.prefix_hits


@pytest.mark.parametrize("num_kv_blocks", [64, 18], ids=["roomy", "tight"])
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_guesses(tiny_checkpoint: Path, plainly: dict[float, Said], params: SamplingParams, num_kv_blocks: int) -> None:
    settings = {**SETTINGS, "block_size": 16, "num_kv_blocks": num_kv_blocks}
    found, stats = said(tiny_checkpoint, params, **settings, speculative_config=NGRAM)
    assert found == plainly[params.temperature]
    assert 0 < stats.num_accepted_drafts <= stats.num_drafts
    assert (stats.num_preemptions > 0) is (num_kv_blocks == 18)


def test_drafts_and_stop_strings(tiny_checkpoint: Path) -> None:
    """The text ends at the stop string, even if it is in the middle of the drafts."""
    prompts = prompts_that_begin_alike()
    with LLM(tiny_checkpoint, **PLAIN) as plain, LLM(tiny_checkpoint, **PLAIN, speculative_config=NGRAM) as drafting:
        for number, result in enumerate(plain.generate(prompts, GREEDY)):
            text = result.outputs[0].text
            stop = text[len(text) // 2 :][:2]
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,))
            want, found = (llm.generate([prompts[number]], params)[0].outputs[0] for llm in (plain, drafting))
            assert (found.text, found.finish_reason) == (want.text, want.finish_reason)
            assert found.finish_reason == "stop"
        assert drafting.engine.stats().num_accepted_drafts > 0


def test_a_contiguous_cache_is_one_block_for_each_context(tiny_checkpoint: Path, plainly: dict[float, Said]) -> None:
    contiguous = {**SETTINGS, "block_size": MAX_MODEL_LEN, "num_kv_blocks": 4}
    found, stats = said(tiny_checkpoint, GREEDY, **contiguous)
    assert found == plainly[0]
    assert stats.num_preemptions == 0


def test_a_block_longer_than_any_context(tiny_checkpoint: Path, plainly: dict[float, Said]) -> None:
    found, _ = said(tiny_checkpoint, GREEDY, **{**SETTINGS, "block_size": 1000, "num_kv_blocks": 3})
    assert found == plainly[0]


def test_a_block_that_does_not_fit_is_refused_with_the_reason(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="blocks of 1000000000 tokens"):
        LLM(tiny_checkpoint, **{**SETTINGS, "block_size": 10**9})
