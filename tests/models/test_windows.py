"""Models whose layers all have windows: little memory, however long the text, and the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.models.config import ModelConfig
from tests.models.families import MAX_LEN, make_checkpoint
from tests.models.test_architectures import random_tokens

ROWS = {"mistral/window": 7, "phi3/short": 11, "mixtral/window": 11}
STEP, BLOCK_SIZE = 12, 4
PROMPT = random_tokens(300)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def make_llm(folder: Path, window: int, num_seqs: int, **settings: Any) -> LLM:
    """With room for ``num_seqs`` windows and steps, which is much less than one prompt."""
    blocks = num_seqs * (-(-(window + STEP) // BLOCK_SIZE) + 1)
    sizes = {"block_size": BLOCK_SIZE, "num_kv_blocks": blocks, "max_num_batched_tokens": STEP, "max_num_seqs": 4}
    return LLM(folder, device="cpu", dtype="float32", max_model_len=MAX_LEN, **{**sizes, **settings})


def watch(llm: LLM) -> list[int]:
    """Blocks in use after each step, which is checked too."""
    used: list[int] = []
    step = llm.engine.step

    def checked() -> Any:
        outputs = step()
        llm.engine.check()
        used.append(llm.engine.stats().num_used_blocks)
        return outputs

    llm.engine.step = checked  # type: ignore[method-assign]
    return used


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


def test_only_a_model_whose_layers_all_have_windows_gives_back() -> None:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_layers": 3, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    more = {"architecture": "x", "ffn_size": 8, "norm_eps": 1.0, "max_position_embeddings": 99, "eos_token_ids": ()}
    for windows, window in (((5, 5, 5), 5), ((5, 9, 5), 9), ((5, 0, 5), 0), ((), 0)):
        assert ModelConfig(**sizes, **more, tie_word_embeddings=False, windows=windows).window == window  # type: ignore[arg-type]
