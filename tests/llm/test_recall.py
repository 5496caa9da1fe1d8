"""A model of recurrent layers alone that is trained here to recall what it read 2,000 tokens before.

The weights of published models cannot be had here, and random ones forget: only a model that needs its state shows
whether a hit restores the right one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from octavo import LLM, SamplingParams

NUM_PAIRS, QUERY = 6, 9
KEYS, VALUES, FILLERS = range(10, 26), range(26, 42), range(42, 58)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention"] * 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "eos_token_id": 2,
}


def made(rng: random.Random, num_fillers: int) -> tuple[list[int], dict[int, int]]:
    """Pairs of keys and values, then fillers; and the value of each key."""
    pairs = {key: rng.choice(VALUES) for key in rng.sample(KEYS, NUM_PAIRS)}
    return [*(token for pair in pairs.items() for token in pair), *rng.choices(FILLERS, k=num_fillers)], pairs


def trained() -> Any:
    """A model that answers a query, followed by a key, with the key's value, whatever is in between."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**SIZES))
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):  # hardly any decay
            weight.data.fill_(-7.0)
            weight.requires_grad = False
    optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=3e-3)
    rng, share = random.Random(0), 0.0
    for _ in range(800):
        num_fillers = rng.choice([4, 16, 40, 100]) if share > 0.6 else rng.choice([2, 4, 8])
        rows = []
        for _ in range(32):
            text, pairs = made(rng, num_fillers)
            asked = rng.sample(list(pairs.items()), NUM_PAIRS)
            rows.append([*text, *(token for key, value in asked for token in (QUERY, key, value))])
        tokens = torch.tensor(rows)
        answers = torch.arange(2 * NUM_PAIRS + num_fillers + 2, tokens.shape[1], 3)
        logits = model(tokens, use_cache=False).logits[:, answers - 1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, answers].flatten())
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        right = (logits.argmax(-1) == tokens[:, answers]).float().mean().item()
        share = 0.95 * share + 0.05 * right
        if share > 0.995:
            break
    return model


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_what_was_read_long_ago_is_recalled_with_the_prefix_cache_as_without(tmp_path: Path) -> None:
    trained().save_pretrained(tmp_path)
    rng = random.Random(5)
    texts = [made(rng, 2000) for _ in range(6)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    answers, num_cached = [], []
    for caching in (False, True):
        with LLM(tmp_path, device="cpu", dtype="float32", enable_prefix_caching=caching) as llm:
            found = [llm.generate([[*text, QUERY, key]], params)[0] for text, pairs in texts for key in pairs]
        answers.append([result.outputs[0].token_ids[0] for result in found])
        num_cached.append(sum(result.num_cached_tokens for result in found))
    assert answers[0] == answers[1]
    assert num_cached[0] == 0
    assert num_cached[1] > 6 * (NUM_PAIRS - 1) * 1900
    expected = [value for _, pairs in texts for value in pairs.values()]
    assert sum(a == b for a, b in zip(answers[1], expected, strict=True)) > 0.75 * len(expected)
