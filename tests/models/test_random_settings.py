"""Random settings of families, such as no published checkpoint has: what transformers computes with them, or a
refusal by name.

Settings that transformers refuses, or fails with, are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from octavo import LLM
from octavo.errors import CheckpointError
from tests.models.families import MAX_LEN, ROWS, SHAPE, make_checkpoint
from tests.models.test_architectures import SETTINGS, logits_of, random_tokens
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import one_in

pytestmark = needs_float_kernels
TOLERANCE = 2e-4
"""Of logits, in parts of the largest."""
WHOLE = [row for row, (_, values) in ROWS.items() if not any(key.startswith("index") for key in values)]
"""Families without an indexer: of positions whose scores are equal but for rounding, another may be chosen."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
NO_EFFECT = {
    "is_encoder_decoder",
    "is_decoder",
    "return_dict",
    "use_cache",
    "output_attentions",
    "output_router_logits",
}
NOT_DRAWN = (
    "dropout",
    "initializer",
    "aux_loss",
    "jitter",
    "theta",
    "rotary",
    "attention_multiplier",
    "chunk",
    "pdrop",
)
"""Parts of names of numbers that change nothing, or are drawn with others."""


def draw_rope(rng: random.Random, width: int) -> dict[str, Any]:
    """Rotary keys for heads of which ``width`` numbers are rotated."""
    half, original = width // 2, {"original_max_position_embeddings": rng.choice([24, 50, 100])}
    lists = {
        name: [round(rng.uniform(1, most), 2) for _ in range(half)]
        for name, most in (("short_factor", 2), ("long_factor", 9))
    }
    more: dict[str, dict[str, Any]] = {
        "default": {},
        "linear": {"factor": 3.5},
        "dynamic": {"factor": 2.0},
        "yarn": {
            "factor": 4.0,
            **original,
            **rng.choice([{}, {"truncate": False}, {"mscale": 0.7, "mscale_all_dim": 1}]),
        },
        "longrope": {**lists, **original, **rng.choice([{}, {"factor": 2.0}])},
        "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
    }
    kind = rng.choice(list(more))
    return {"rope_type": kind, "rope_theta": rng.choice([10.0, 500.0, 1e6]), **more[kind]}


def draw_heads(rng: random.Random, known: Mapping[str, Any]) -> dict[str, Any]:
    """Odd counts of heads, and widths that are no power of two."""
    heads, kv_heads = rng.choice([(1, 1), (3, 1), (3, 3), (5, 5), (6, 2), (7, 7), (8, 2)])
    found = {"num_attention_heads": heads, "hidden_size": heads * rng.choice([6, 10, 12])}
    if known.get("head_dim") is not None:
        found["head_dim"] = rng.choice([6, 8, 12, 20])
    if "num_key_value_heads" in known:
        found["num_key_value_heads"] = heads if known.get("kv_lora_rank") else kv_heads
    return found


def draw_layers(rng: random.Random, known: Mapping[str, Any]) -> dict[str, Any]:
    """Another number of layers, whose kinds come in any order."""
    count = rng.randint(1, 5)
    lists = {
        key: [rng.choice(sorted(set(value))) for _ in range(count)]
        for key, value in known.items()
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    }
    return {"num_hidden_layers": count, **lists}


def draw_experts(rng: random.Random, known: Mapping[str, Any]) -> dict[str, Any]:
    """Few experts or one, of which one or all are chosen, and none or more that are shared."""
    count = rng.choice([1, 2, 4, 6])
    found = {key: count for key in EXPERTS if known.get(key)}
    found |= {key: rng.choice([1, count]) for key in CHOSEN if known.get(key)}
    found |= {key: rng.randint(0, 2) for key in ("n_shared_experts", "first_k_dense_replace") if key in known}
    return found | ({"n_group": 1, "topk_group": 1} if known.get("n_group") else {})


def draw(rng: random.Random, row: str) -> dict[str, Any]:
    """Some settings that differ from the row's."""
    kind, values = ROWS[row]
    default = AutoConfig.for_model(kind).to_dict()
    known = {**default, **{key: value for key, value in SHAPE.items() if key in default}, **values}
    head_dim = known.get("head_dim") or known.get("hidden_size", 32) // known.get("num_attention_heads", 4)
    flags = [key for key, value in known.items() if isinstance(value, bool) and key not in NO_EFFECT]
    numbers = [key for key, value in known.items() if isinstance(value, float) and not any(n in key for n in NOT_DRAWN)]
    sizes = [key for key, value in known.items() if key.endswith("intermediate_size") and type(value) is int and value]
    drawn: list[dict[str, Any]] = [
        {key: not known[key] for key in rng.sample(flags, min(2, len(flags)))},
        {key: known[key] * rng.choice([0.5, 1.3, 2.0]) for key in rng.sample(numbers, min(2, len(numbers)))},
        {key: rng.choice([17, 33, 50]) for key in sizes},
        draw_layers(rng, known) if "num_hidden_layers" in known else {},
        draw_experts(rng, known),
        {"sliding_window": rng.choice([1, 5, 64])} if "sliding_window" in known else {},
    ]
    if "num_attention_heads" in known:
        drawn.append(draw_heads(rng, known))
    if known.get("rope_parameters", default.get("rope_parameters")) and "kv_lora_rank" not in known:
        drawn.append({"rope_parameters": draw_rope(rng, head_dim)})
    found: dict[str, Any] = {}
    for part in rng.sample(drawn, rng.randint(1, 3)):
        found |= part
    return found


@one_in(61)
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("row", WHOLE)
def test_random_settings(row: str, number: int, tmp_path: Path) -> None:
    changes = draw(random.Random(f"{row} {number}"), row)
    prompt = random_tokens(130)
    try:
        model = make_checkpoint(tmp_path, row, **changes)
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    except Exception as error:
        pytest.skip(f"transformers: {error}")
    try:
        llm = LLM(tmp_path, dtype="float32", block_size=16, max_model_len=MAX_LEN, **SETTINGS)
    except CheckpointError as error:
        if not str(error).startswith(("config: ", "tensor ", "lm_head")):
            raise
        return
    with llm:
        found, _ = logits_of(llm, prompt)
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(found / scale, expected / scale, atol=TOLERANCE, rtol=0, msg=str(changes))
