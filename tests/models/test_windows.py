"""Models of windows: little memory, however long the text, and the same tokens.

Of some models all layers have windows; of others only some, so that a text is short in one pool and long in the other.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from tests.models.families import MAX_LEN, make_checkpoint
from tests.models.test_architectures import random_tokens
from tests.tiers import one_in

ROWS = {"mistral/window": 7, "phi3/short": 11, "mixtral/window": 11}
STEP, BLOCK_SIZE = 12, 4
PROMPT = random_tokens(300)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def make_llm(folder: Path, window: int, num_seqs: int, **settings: Any) -> LLM:
    """With room for ``num_seqs`` windows and steps, which is much less than one prompt."""
    blocks = num_seqs * (-(-(window + STEP) // BLOCK_SIZE) + 1)
    sizes = {"block_size": BLOCK_SIZE, "num_kv_blocks": blocks, "max_num_batched_tokens": STEP, "max_num_seqs": 4}
    return LLM(folder, device="cpu", dtype="float32", max_model_len=MAX_LEN, **{**sizes, **settings})


def watch(llm: LLM, look: Callable[[], int] | None = None) -> list[int]:
    """What ``look`` sees after each step, or the blocks in use; each step is checked too."""
    used: list[int] = []
    step = llm.engine.step

    def checked() -> Any:
        outputs = step()
        llm.engine.check()
        used.append(llm.engine.stats().num_used_blocks if look is None else look())
        return outputs

    llm.engine.step = checked  # type: ignore[method-assign]
    return used


@one_in(5)
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_of_one_window_serves_any_length(row: str, caching: bool, tmp_path: Path) -> None:
    model, window = make_checkpoint(tmp_path, row), ROWS[row]
    with make_llm(tmp_path, window, 1, enable_prefix_caching=caching) as llm:
        used = watch(llm)
        tokens = list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    most = -(-(window + STEP) // BLOCK_SIZE) + 1
    assert max(used) <= most < len(PROMPT) // BLOCK_SIZE // 5
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens]), use_cache=False).logits[0]
    assert tokens == logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist()


def test_many_at_once_with_prefixes_and_preemptions_give_what_each_gives_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral/window")
    prompts = [PROMPT, PROMPT[:150] + random_tokens(40, 1), random_tokens(90, 2), PROMPT[:280], random_tokens(5, 3)]
    with make_llm(tmp_path, 7, 60) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    with make_llm(tmp_path, 7, 2, max_num_batched_tokens=5) as llm:
        watch(llm)
        for _ in range(2):
            assert [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)] == alone


def test_the_next_turn_needs_only_the_last_window(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral/window")
    with make_llm(tmp_path, 7, 2) as llm:
        first = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
        longer = [*PROMPT, *first]
        again = llm.generate([longer], GREEDY)[0]
    assert again.num_cached_tokens >= len(longer) - BLOCK_SIZE
    with make_llm(tmp_path, 7, 2) as llm:
        assert llm.generate([longer], GREEDY)[0].outputs[0].token_ids == again.outputs[0].token_ids


def test_the_memory_plan_asks_for_a_window_and_a_step(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mistral/window")
    with pytest.raises(ConfigError, match="of which 23 are kept"):
        make_llm(tmp_path, 7, 1, num_kv_blocks=5)
    with make_llm(tmp_path, 7, 1, num_kv_blocks=6) as llm:
        assert llm.info.max_model_len == MAX_LEN


HYBRIDS = {"gemma2/capped": 7, "gpt_oss/sinks": 9}


def make_hybrid(folder: Path, **settings: Any) -> LLM:
    sizes = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": STEP, "max_num_seqs": 4, "kv_cache_memory": 0.01}
    return LLM(folder, device="cpu", dtype="float32", **{"max_model_len": MAX_LEN, **sizes, **settings})


@one_in(2)
@pytest.mark.parametrize("row", HYBRIDS)
def test_layers_with_windows_hold_a_window_and_a_step_of_any_length(row: str, tmp_path: Path) -> None:
    model, most = make_checkpoint(tmp_path, row), -(-(HYBRIDS[row] + STEP) // BLOCK_SIZE) + 1
    with make_hybrid(tmp_path, max_num_seqs=1) as llm:
        cache = llm.engine.scheduler.cache
        used, whole = watch(llm, lambda: cache.groups[1].num_used), watch(llm)
        tokens = list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
        again = llm.generate([[*PROMPT, *tokens]], GREEDY)[0]
        assert again.num_cached_tokens >= len(PROMPT) + len(tokens) - 1 - BLOCK_SIZE
    assert max(used) <= most
    assert max(whole) == -(-(2 * len(tokens) + len(PROMPT) - 1) // BLOCK_SIZE)
    for prompt, result in ((PROMPT, tokens), ([*PROMPT, *tokens], list(again.outputs[0].token_ids))):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + result]), use_cache=False).logits[0]
        assert result == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def test_a_text_fits_that_did_not_fit_in_blocks_of_all_layers(tmp_path: Path) -> None:
    """A third of the layers sees everything, so that of 60 blocks of all layers more than 100 can be made."""
    make_checkpoint(tmp_path, "gpt_oss/sinks", layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    with pytest.raises(ConfigError, match="lower max_model_len to 240"):
        make_hybrid(tmp_path, kv_cache_memory=None, num_kv_blocks=60, kv_offload_memory=0.1)
    with make_hybrid(tmp_path, kv_cache_memory=None, num_kv_blocks=60) as llm:
        assert llm.info.num_kv_blocks >= MAX_LEN // BLOCK_SIZE == 100
        full, windows = llm.info.kv_groups
        assert (full.num_layers, full.num_blocks, windows.num_layers) == (1, llm.info.num_kv_blocks, 2)
        assert 0 < windows.num_blocks < 60
        per_block = llm.info.memory["kv_cache"] / (full.num_blocks + 2 * windows.num_blocks)
        assert 179 <= llm.info.memory["kv_cache"] / per_block <= 180
        found = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    with make_hybrid(tmp_path, kv_offload_memory=0.1) as llm:
        assert len(llm.info.kv_groups) == 1
        assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == found


def test_more_texts_run_at_once_in_the_same_memory(tmp_path: Path) -> None:
    """Eight of the nine layers have windows of 7 positions, and texts are of 250."""
    make_checkpoint(
        tmp_path, "gemma3/two_ropes", num_hidden_layers=9, layer_types=["sliding_attention"] * 8 + ["full_attention"]
    )
    prompts = [random_tokens(210, i) for i in range(5)]
    sizes: dict[str, Any] = {"kv_cache_memory": None, "num_kv_blocks": 126, "max_num_seqs": 8, "max_model_len": 260}
    sizes["max_num_batched_tokens"] = 60
    running, results = [], []
    for more in ({"kv_offload_memory": 0.1}, {}):
        with make_hybrid(tmp_path, **sizes, **more) as llm:
            stats = watch(llm, lambda llm=llm: llm.engine.stats().num_running)  # type: ignore[misc]
            results.append([result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)])
            running.append(max(stats))
            assert llm.engine.stats().num_preemptions == 0
    assert running == [2, 5]
    assert results[0] == results[1]


def test_many_of_a_hybrid_at_once_give_what_each_gives_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma2/capped")
    prompts = [PROMPT, PROMPT[:150] + random_tokens(40, 1), random_tokens(90, 2), PROMPT[:280], random_tokens(5, 3)]
    with make_hybrid(tmp_path, kv_offload_memory=0.1) as llm:
        assert len(llm.info.kv_groups) == 1
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
    with make_hybrid(tmp_path, kv_cache_memory=None, num_kv_blocks=70, max_num_batched_tokens=5) as llm:
        assert 0 < llm.info.kv_groups[1].num_blocks < 70
        watch(llm)
        for _ in range(2):
            assert [result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)] == alone
