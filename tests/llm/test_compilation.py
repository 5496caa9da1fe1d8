"""No request waits until a kernel is compiled for another one: an engine has all of its kernels when it begins."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.grammar import forms
from octavo_kernels.cpu import compiled
from tests.llm.tiny import SETTINGS, write_checkpoint
from tests.models.adapter_files import make_adapter
from tests.models.families import make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.tiers import one_in

pytestmark = needs_float_kernels

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
PROMPTS = [[5, 6, 7] * 12, [9], list(range(3, 50))]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "n": 3},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {5: 2.0}, "min_tokens": 2, "logprobs": 3, "prompt_logprobs": 2},
    {"bad_words": ["ab"], "temperature": 0},
    {"grammar": forms.grammar_text(forms.regex("[a-z]+"))},
]


def forget_kernels() -> None:
    """As in a new process: what was compiled is found on disk."""
    for name, module in list(sys.modules.items()):
        if name.startswith("octavo_kernels.cpu."):
            for part in list(vars(module).values()):
                if hasattr(part, "cache_clear") and part.__wrapped__.__annotations__.get("return") == "int":
                    part.cache_clear()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    write_checkpoint(home / "base")
    make_checkpoint(home / "base", "llama/gqa", vocab_size=264)
    make_adapter(home / "base", home / "adapter", 0)
    return home


@one_in(3)
@pytest.mark.parametrize("kind", ["plain", "drafts", "drafter", "adapter"])
def test_no_request_waits_until_a_kernel_is_compiled(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = str(folder / "base"), "own" if kind == "adapter" else None
    drafter = {**DRAFTS, "method": "draft_model", "model": base}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "drafts": {"speculative_config": json.dumps(DRAFTS)},
        "drafter": {"speculative_config": json.dumps(drafter)},
        "adapter": {"enable_lora": True, "lora_modules": f"own={folder / 'adapter'}"},
    }
    forget_kernels()
    with LLM(base, **{**SETTINGS, "load_format": "auto", "device": "cpu", **settings[kind]}) as llm:
        late = list[str]()
        compile_now = compiled._compiled_now

        def note(signature: Any, function: Any) -> int:
            late.append(f"{function.__module__}.{function.__qualname__}")
            return compile_now(signature, function)

        monkeypatch.setattr(compiled, "_compiled_now", note)
        for params in KINDS:
            llm.generate(PROMPTS, SamplingParams(max_tokens=6, ignore_eos=True, **params), adapter=adapter)
        llm.embed(PROMPTS)
    assert not late
