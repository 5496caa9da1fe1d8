"""Prompts computed by one engine and answered by another give the tokens of one engine, for every kind of cache."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.types import KVTransfer, Output, Request
from tests.models.families import make_checkpoint
from tests.models.test_architectures import random_tokens
from tests.tiers import nightly_after

KEY = {"kv_transfer_key": "a key"}
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "num_kv_blocks": 200,
    "max_model_len": 400,
}
ROWS = {
    "llama/gqa": 16,
    "qwen3_5/dense": 64,
    "gemma2/capped": 16,
    "deepseek_v2/lite": 16,
    "gpt_oss/sinks": 16,
    "mamba2/alone": 64,
    "kimi_linear/experts": 64,
}
"""Kinds of caches: full attention, recurrent states beside keys, windows beside full attention, latent, states alone;
and the multiple of tokens up to which a prompt comes from the other engine."""


def answer(llm: LLM, request: Request) -> list[Output]:
    engine = llm.engine
    assert engine is not None
    engine.add(request)
    outputs: list[Output] = []
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    assert outputs[-1].error is None
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize(
    ("row", "kind"), nightly_after(4, [("gpt_oss/sinks", "int4"), *((row, "auto") for row in ROWS)])
)
def test_the_tokens_are_those_of_one_engine(row: str, kind: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    prompts = [random_tokens(150), random_tokens(150)[:100] + random_tokens(40, 2), random_tokens(70, 1), [5, 6, 7]]
    kinds = [SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_p=0.9)]
    requests = [Request(n, prompt, kinds[n % 2], 6, seed=n) for n, prompt in enumerate(prompts)]
    sizes: dict[str, Any] = {"kv_cache_dtype": kind, **({} if row == "mamba2/alone" else {"block_size": 16})}
    with LLM(tmp_path, **SETTINGS, **sizes) as llm:
        alone = [tokens_of(answer(llm, request)) for request in requests]
    with (
        LLM(tmp_path, **SETTINGS, **sizes, **KEY, role="prefill", max_num_batched_tokens=64) as prefill,
        LLM(tmp_path, **SETTINGS, **sizes, **KEY, role="decode") as decode,
    ):
        assert prefill.engine is not None
        for request, expected in zip(requests, alone, strict=True):
            first = msgspec.structs.replace(request, max_tokens=1, transfer=KVTransfer())
            transfer = answer(prefill, first)[-1].transfer
            assert transfer is not None
            found = answer(decode, msgspec.structs.replace(request, transfer=transfer))
            assert tokens_of(found) == expected
            part = (len(request.prompt_tokens) - 1) // ROWS[row] * ROWS[row]
            assert found[-1].num_cached_tokens >= part
        assert decode.engine is not None
        stats = decode.engine.stats()
        assert stats.num_transfer_failures == 0 < stats.num_transfer_received
        assert stats.num_prompt_tokens < len(requests) * ROWS[row]
        assert prefill.engine.stats().num_transfer_held == 0


def test_what_a_role_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, named in (
        ({"role": "decode"}, "kv_transfer_key"),
        ({"role": "prefill", **KEY, "enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_transfer_ttl": 3.0}, "kv_transfer_ttl needs role"),
        ({"role": "decode", **KEY, "lora_modules": "a=b", "merge_lora": True}, "merge_lora"),
    ):
        with pytest.raises(ConfigError, match=named):
            LLM(tmp_path, **settings)  # type: ignore[arg-type]
    make_checkpoint(tmp_path, "llama/gqa")
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(ConfigError, match="kv_connector: nixl needs: pip install"):
        LLM(tmp_path, **SETTINGS, **KEY, role="decode", kv_connector="nixl")
