"""Drafters on the device: their logits are those of plain references, and no output changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.ops.sample import BANNED
from octavo.runtime import drafters
from octavo.runtime.drafter import DraftInputs
from octavo.runtime.drafters import BlockDrafter, HeadDrafter, ModelDrafter
from octavo.types import EngineStats
from tests.models.drafter_files import Reference, dflash, eagle3, model_reference, mtp
from tests.models.families import make_checkpoint

SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_kv_blocks": 120, "max_num_batched_tokens": 48}
NUM_DRAFTS = 4


class Case:
    """A model, its drafter, and the reference of the drafter."""

    def __init__(self, target: Path, reference: Reference, **config: Any) -> None:
        self.target, self.reference = target, reference
        self.config = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False, **config}


def _draft_model(folder: Path, target: str = "llama/gqa", row: str = "qwen3/wide_heads") -> Case:
    make_checkpoint(folder / "model", target)
    make_checkpoint(folder / "draft", row)
    reference = model_reference(folder / "draft")
    return Case(folder / "model", reference, method="draft_model", model=str(folder / "draft"))


def _eagle3(folder: Path, layout: str, layers: tuple[int, ...], row: str = "llama/gqa", **flags: Any) -> Case:
    make_checkpoint(folder / "model", row, num_hidden_layers=6, **({"layer_types": None} if "qwen" in row else {}))
    reference = eagle3(folder / "draft", folder / "model", layout, layers, **flags)
    return Case(folder / "model", reference, method="eagle3", model=str(folder / "draft"))


def _mtp(folder: Path, row: str, names: str, **changes: Any) -> Case:
    return Case(folder / "model", mtp(folder / "model", row, names, **changes), method="mtp")


def _dflash(folder: Path, layout: str) -> Case:
    make_checkpoint(folder / "model", "qwen3/wide_heads", num_hidden_layers=4, layer_types=None)
    reference = dflash(folder / "draft", folder / "model", (0, 2), layout)
    return Case(folder / "model", reference, method="dflash", model=str(folder / "draft"))


CASES: dict[str, Callable[[Path], Case]] = {
    "draft_model": _draft_model,
    "draft_model of another kind": lambda folder: _draft_model(folder, "mistral/window", "gpt2/small"),
    "draft_model with windows": lambda folder: _draft_model(folder, "qwen2/biases", "gemma3/two_ropes"),
    "draft_model with latents": lambda folder: _draft_model(folder, "mixtral/two_of_five", "deepseek_v3/groups"),
    "eagle3 of its authors": lambda folder: _eagle3(folder, "authors", (2, 3, 3)),
    "eagle3 of speculators": lambda folder: _eagle3(folder, "speculators", (0, 3, 5), "mistral/window"),
    "eagle3 with flags": lambda folder: _eagle3(
        folder, "speculators", (1, 4), "qwen3/wide_heads", norm_before_residual=False, norm_before_fc=True
    ),
    "eagle3 with more flags": lambda folder: _eagle3(
        folder, "authors", (2, 3, 3), "llama/gqa", fc_norm=True, norm_output=True, norm_before_residual=True
    ),
    "mtp of DeepSeek-V3": lambda folder: _mtp(folder, "deepseek_v3/groups", "deepseek"),
    "mtp of GLM-4": lambda folder: _mtp(folder, "glm4/biases", "deepseek"),
    "mtp of Qwen3-Next": lambda folder: _mtp(folder, "qwen3/wide_heads", "qwen"),
    "mtp of Qwen3-Next with experts": lambda folder: _mtp(folder, "qwen3_moe/normalised", "qwen"),
    "dflash of its authors": lambda folder: _dflash(folder, "authors"),
    "dflash of speculators": lambda folder: _dflash(folder, "speculators"),
}
Made = Callable[[str], Case]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = CASES[name](tmp_path_factory.mktemp("case"))
        return made[name]

    return get


Drawn = tuple[int, int, list[Tensor]]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drawn]]:
    """For each pass of a drafter: the positions of the newest tokens, and the logits it drew from."""
    passes: list[Any] = []
    draw = drafters.drawn

    def recorded(logits_SV: Tensor, *args: Any) -> Tensor:
        passes[-1][1].append(logits_SV.clone())
        return draw(logits_SV, *args)

    for kind in (HeadDrafter, ModelDrafter, BlockDrafter):

        def call(self: Any, inputs: DraftInputs, whole: Any = kind.__call__) -> Tensor:
            passes.append((inputs.positions_T[inputs.last_rows_S] + 1, []))
            result: Tensor = whole(self, inputs)
            return result

        monkeypatch.setattr(kind, "__call__", call)
    monkeypatch.setattr(drafters, "drawn", recorded)
    yield passes


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_a_plain_reference(case_of: Made, name: str, drafted: list[Any]) -> None:
    case = case_of(name)
    prompt = [(7 * i + 3) % 90 for i in range(61)]  # two chunks
    with LLM(case.target, **SETTINGS, speculative_config=case.config) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        [result] = llm.generate([prompt], params)
    text = [*prompt, *result.outputs[0].token_ids]
    num_compared = 0
    for newest_S, logits in drafted:
        newest = int(newest_S[0])
        # From the last token on nothing is stored; and what follows a chunk of the prompt is not drafted.
        if newest < len(prompt) or newest + NUM_DRAFTS + 1 >= len(text):
            continue
        found = torch.cat(logits).masked_fill(torch.cat(logits) == BANNED, -torch.inf)
        want = case.reference(text[: newest + 1], NUM_DRAFTS)
        assert found.shape == want.shape
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
        num_compared += 1
    assert num_compared > 5


def some_params(rng: random.Random) -> SamplingParams:
    penalties = {"frequency_penalty": 0.5} if rng.random() < 0.3 else {}
    bias = {"logit_bias": {rng.randrange(90): 5.0}} if rng.random() < 0.3 else {}
    return SamplingParams(
        temperature=rng.choice([0, 0, 0.7, 1.0]),
        seed=rng.randrange(1000),
        max_tokens=rng.randrange(1, 40),
        top_k=rng.choice([0, 5]),
        min_p=rng.choice([0, 0.05]),
        logprobs=rng.choice([None, 2]),
        ignore_eos=rng.random() < 0.5,
        num_speculative_tokens=rng.choice([None, None, 0, 2]),
        **penalties,
        **bias,
    )


def generated(model: Path, seed: str, **settings: Any) -> tuple[list[Any], EngineStats]:
    """What random requests get: many at once, with prompts that begin alike."""
    rng, found = random.Random(seed), []
    with LLM(model, **{**SETTINGS, **settings}) as llm:
        for _ in range(6):
            params = [some_params(rng) for _ in range(rng.randrange(5, 9))]
            lengths = [rng.randrange(1, 70) for _ in params]
            prompts = [[(5 * i + i // 9) % 11 for i in range(length)] + [rng.randrange(90)] for length in lengths]
            found += [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
            llm.engine.check()
        return found, llm.engine.stats()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_no_token_changes(case_of: Made, name: str, adaptive: bool) -> None:
    case = case_of(name)
    want, _ = generated(case.target, name)
    config = {**case.config, "adaptive": adaptive}
    for settings in ({}, {"num_kv_blocks": 16, "max_model_len": 120}):
        found, stats = generated(case.target, name, **settings, speculative_config=config)
        assert found == want
        assert stats.num_drafts > 0 or adaptive
    assert stats.num_preemptions > 0
