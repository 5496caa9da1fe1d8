"""Drafters on the device: their logits are those of plain references, and no output changes."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, Engine, SamplingParams
from octavo.build import build_drafter
from octavo.build import build_engine as build
from octavo.engine import scheduler
from octavo.engine.speculative import drafter_switch
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.stacked_lora import StackedRows
from octavo.models import model_adapters
from octavo.models.drafters.dflash import DFlashModel
from octavo.ops import dispatch
from octavo.ops.dispatch import REFERENCE
from octavo.ops.drafting import NewestTokens
from octavo.runtime.drafting.drafter import DraftInputs
from octavo.runtime.drafting.drafters import BlockDrafter, Draws, HeadDrafter, ModelDrafter
from octavo.runtime.executors.stream_executor import StreamExecutor
from octavo.types import EngineStats
from tests.llm.test_any_requests import some_params, without_rounding
from tests.llm.tiny import write_checkpoint
from tests.models.adapter_files import make_adapter
from tests.models.drafter_files import Reference, dflash, eagle3, model_reference, mtp, nemotron_mtp
from tests.models.families import make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant.writers import Writer, compressed, gptq, quantise
from tests.runtime.thread_ranks import ranks_as_threads
from tests.tiers import nightly, nightly_after, one_in

SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_kv_blocks": 120, "max_num_batched_tokens": 48}
NUM_DRAFTS = 4
VOCAB_SIZE = 264


class Case:
    """A model, its drafter, and the reference of the drafter."""

    def __init__(self, target: Path, reference: Reference, **config: Any) -> None:
        self.target, self.reference = target, reference
        self.has_states = "linear_attention" in (target / "config.json").read_text()
        self.config = {"num_speculative_tokens": NUM_DRAFTS, "adaptive": False, **config}


def _target(folder: Path, row: str, **changes: Any) -> None:
    """A family's model with a tokenizer, which grammars need."""
    write_checkpoint(folder / "model")
    make_checkpoint(folder / "model", row, vocab_size=VOCAB_SIZE, **changes)


def _draft_model(folder: Path, target: str = "llama/gqa", row: str = "qwen3/wide_heads") -> Case:
    _target(folder, target)
    make_checkpoint(folder / "draft", row, vocab_size=VOCAB_SIZE)
    reference = model_reference(folder / "draft")
    return Case(folder / "model", reference, method="draft_model", model=str(folder / "draft"))


def _eagle3(folder: Path, layout: str, layers: tuple[int, ...], row: str = "llama/gqa", **flags: Any) -> Case:
    _target(folder, row, num_hidden_layers=6, **({"layer_types": None} if "qwen" in row else {}))
    reference = eagle3(folder / "draft", folder / "model", layout, layers, **flags)
    return Case(folder / "model", reference, method="eagle3", model=str(folder / "draft"))


def _mtp(folder: Path, row: str, names: str, **changes: Any) -> Case:
    write_checkpoint(folder / "model")
    reference = mtp(folder / "model", row, names, vocab_size=VOCAB_SIZE, **changes)
    own = {"num_speculative_tokens": 1} if "layer_types" in changes else {}  # most often all or none are accepted
    return Case(folder / "model", reference, method="mtp", **own)


def _nemotron_mtp(folder: Path) -> Case:
    write_checkpoint(folder / "model")
    reference = nemotron_mtp(folder / "model", vocab_size=VOCAB_SIZE)
    return Case(folder / "model", reference, method="mtp")


def _dflash(folder: Path, layout: str, row: str = "qwen3/wide_heads") -> Case:
    _target(folder, row, num_hidden_layers=4, layer_types=None)
    reference = dflash(folder / "draft", folder / "model", (0, 2), layout)
    return Case(folder / "model", reference, method="dflash", model=str(folder / "draft"))


ONE_OF_TWO = ["linear_attention", "full_attention", "full_attention"]
"""The last one is the MTP layer's."""
DFLASH = "dflash of its authors"
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
    "mtp of DeepSeek-V3.2": lambda folder: _mtp(folder, "deepseek_v32/groups", "deepseek"),
    "mtp of GLM-4": lambda folder: _mtp(folder, "glm4/biases", "deepseek"),
    "mtp of GLM-4.5": lambda folder: _mtp(folder, "glm4_moe/normed_heads", "deepseek"),
    "mtp of Qwen3-Next": lambda folder: _mtp(folder, "qwen3/wide_heads", "qwen"),
    "mtp of Qwen3-Next with experts": lambda folder: _mtp(folder, "qwen3_moe/normalised", "qwen"),
    "mtp of Qwen3.5": lambda folder: _mtp(folder, "qwen3_5/dense", "qwen", layer_types=ONE_OF_TWO),
    "mtp of Nemotron 3": _nemotron_mtp,
    "eagle3 of Qwen3-Next": lambda folder: _eagle3(folder, "speculators", (1, 4), "qwen3_next/some_layers_dense"),
    "draft_model of Qwen3.5": lambda folder: _draft_model(folder, "qwen3_5/dense"),
    DFLASH: lambda folder: _dflash(folder, "authors"),
    "dflash of Qwen3.5": lambda folder: _dflash(folder, "authors", "qwen3_5/dense"),
    "dflash of speculators": lambda folder: _dflash(folder, "speculators"),
}
MUCH_ALIKE = (
    "draft_model of another kind",
    "eagle3 of speculators",
    "eagle3 with more flags",
    "mtp of DeepSeek-V3.2",
    "mtp of GLM-4",
    "mtp of GLM-4.5",
    "mtp of Qwen3-Next with experts",
    "dflash of Qwen3.5",
    "dflash of speculators",
)
"""Cases of which `make test` has one that differs little."""
ONE_OF_EACH_KIND = ("draft_model", "eagle3 with flags", "mtp of DeepSeek-V3", "mtp of Nemotron 3", DFLASH)
Made = Callable[[str], Case]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = CASES[name](tmp_path_factory.mktemp("case"))
        return made[name]

    return get


@pytest.fixture
def loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of a large model take minutes: what can be found out without them is."""
    monkeypatch.setattr(build, "load_any", lambda *_: pytest.fail("the model's weights were loaded"))


Drawn = tuple[int, int, list[Tensor]]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Drawn]]:
    """For each pass of a drafter: the positions of the newest tokens, and the logits over the model's tokens. Of ranks
    that are threads, those of the first."""
    passes: list[Any] = []
    own = threading.get_ident()
    draw, logits_of_block = Draws.draw, DFlashModel.logits

    def note(logits_SV: Tensor, columns: Tensor, vocab_size: int) -> None:
        if threading.get_ident() == own:
            whole_SV = torch.full((len(logits_SV), vocab_size), -torch.inf)
            passes[-1][1].append(whole_SV.index_copy(1, columns, logits_SV.float()))

    def noted(self: Draws, logits_SV: Tensor, target_ids: Tensor | None = None) -> Tensor:
        note(logits_SV, torch.arange(logits_SV.shape[1]) if target_ids is None else target_ids, self._vocab_size)
        return draw(self, logits_SV, target_ids)

    def noted_block(self: DFlashModel, x_RD: Tensor) -> Tensor:
        logits_RV = logits_of_block(self, x_RD)
        note(logits_RV, torch.arange(logits_RV.shape[1]), logits_RV.shape[1])
        return logits_RV

    for kind in (HeadDrafter, ModelDrafter, BlockDrafter):

        def call(self: Any, inputs: DraftInputs, newest: NewestTokens, whole: Any = kind.__call__) -> Tensor:
            if threading.get_ident() == own:
                passes.append((inputs.positions_T[inputs.last_rows_S] + 1, []))
            result: Tensor = whole(self, inputs, newest)
            return result

        monkeypatch.setattr(kind, "__call__", call)
    monkeypatch.setattr(Draws, "draw", noted)
    monkeypatch.setattr(DFlashModel, "logits", noted_block)
    return passes


@one_in(4)
@pytest.mark.parametrize("name", [nightly(name) if name in MUCH_ALIKE else name for name in CASES])
def test_logits_are_those_of_a_plain_reference(
    case_of: Made, name: str, drafted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step in three makes no drafts, behind which the drafter's cache must be complete."""
    numbers = itertools.count()
    monkeypatch.setattr(scheduler, "num_proposed", lambda speculation: NUM_DRAFTS * (next(numbers) % 3 > 0))
    compare_logits(case_of(name), drafted)


@needs_float_kernels
@pytest.mark.parametrize(
    "name",
    nightly_after(
        1, ["eagle3 of its authors", "mtp of Qwen3.5", "mtp of DeepSeek-V3", "mtp of Nemotron 3", "draft_model"]
    ),
)
def test_a_drafter_on_two_ranks_has_the_logits_of_a_plain_reference(
    case_of: Made, name: str, drafted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a part of its heads and of its vocabulary; ranks that drafted other tokens would be lost."""
    ranks_as_threads(monkeypatch)
    compare_logits(case_of(name), drafted, tensor_parallel_size=2)


def compare_logits(case: Case, drafted: list[Any], **settings: Any) -> None:
    prompt = [(7 * i + 3) % 90 for i in range(61)]  # two chunks
    with LLM(case.target, **SETTINGS, **settings, speculative_config=case.config) as llm:
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        [result] = llm.generate([prompt], params)
    text = [*prompt, *result.outputs[0].token_ids]
    num_compared = 0
    for newest_S, logits in drafted:
        newest = int(newest_S[0])
        # From the last token on nothing is stored; and what follows a chunk of the prompt is not drafted.
        if newest < len(prompt) or newest + NUM_DRAFTS + 1 >= len(text):
            continue
        found = torch.cat(logits)
        want = case.reference(text[: newest + 1], NUM_DRAFTS)
        assert len(found) == NUM_DRAFTS or case.has_states  # fewer where a snapshot is due
        torch.testing.assert_close(found, want[: len(found)], rtol=1e-4, atol=1e-4)
        num_compared += 1
    assert num_compared > 5


def requests_of(rng: random.Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Several requests with every field, whose prompts begin alike."""
    params = [some_params(rng) for _ in range(rng.randrange(5, 9))]
    lengths = [rng.randrange(1, 70) for _ in params]
    prompts = [[(5 * i + i // 9) % 11 for i in range(length)] + [rng.randrange(90)] for length in lengths]
    return prompts, [
        msgspec.structs.replace(each, num_speculative_tokens=rng.choice([None, None, 0, 2])) for each in params
    ]


def generated(model: Path, num_rounds: int = 3, **settings: Any) -> tuple[list[Any], EngineStats]:
    """What requests get, several at once."""
    rng, found = random.Random(11), []
    with LLM(model, **{**SETTINGS, **settings}) as llm:
        for _ in range(num_rounds):
            prompts, params = requests_of(rng)
            found += without_rounding(llm.generate(prompts, params))
            llm.engine.check()
        return found, llm.engine.stats()


def test_a_conversation_is_the_same_again_with_an_mtp_layer(case_of: Made) -> None:
    """A model with recurrent state, whose turns begin at snapshots: also those that drafts led past."""
    case, said = case_of("mtp of Qwen3.5"), []
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for config in (None, case.config):
        with LLM(case.target, **SETTINGS, speculative_config=config) as llm:
            for _ in range(2):
                text = [(7 * i + 3) % 90 for i in range(70)]
                for turn in range(3):
                    [result] = llm.generate([text], params)
                    text = [*text, *result.outputs[0].token_ids, 5 + turn, 6]
                said.append(text)
            assert result.num_cached_tokens == 128
    assert said[1:] == said[:1] * 3


TIGHT = {"num_kv_blocks": 16, "max_model_len": 120}


@needs_float_kernels
@pytest.mark.parametrize("name", [nightly(name) for name in ["mtp of Qwen3.5", "draft_model with windows", DFLASH]])
def test_no_output_changes_on_two_ranks(case_of: Made, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_as_threads(monkeypatch)
    case = case_of(name)
    want, _ = generated(case.target)
    found, stats = generated(case.target, tensor_parallel_size=2, speculative_config=case.config)
    assert tokens_of(found) == tokens_of(want)
    assert stats.num_accepted_drafts > 0


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_drafter_does_without_the_adapter_of_a_request(
    tmp_path: Path, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that drafts for itself is always right where there is no adapter, also beside requests that have one."""
    model, params = tmp_path / "model", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    _target(tmp_path, "llama/gqa")
    make_adapter(model, tmp_path / "adapter", 0)
    lora: dict[str, Any] = {"enable_lora": True, "lora_modules": f"own={tmp_path / 'adapter'}"}
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "adaptive": False}
    names, found = (None, "own", None, "own"), []
    if is_ahead:
        monkeypatch.setattr(model_adapters, "AdapterRows", lambda: StackedRows(max_adapters=2, max_rank=8))
        monkeypatch.setattr(build, "DEPTH", {"cpu": 2})
        monkeypatch.setattr(build, "make_executor", stream_executor)
    with dispatch.only(REFERENCE) if is_ahead else contextlib.nullcontext():
        for config in (None, drafting):
            with Engine(model, **SETTINGS, **lora, speculative_config=config, enforce_eager=is_ahead) as engine:
                ids = [engine.add([5, 6, 7 + i], params, adapter=name) for i, name in enumerate(names)]
                engine.run()
                found.append([engine.completed[request_id].outputs[0].token_ids for request_id in ids])
                stats = engine.stats()
    assert found[0] == found[1]
    assert 0 < stats.num_accepted_drafts < stats.num_drafts


def uses_of_the_drafter(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether an adaptive drafter ran, of each step; it is tried, and rests, for a few steps only."""
    used, runs = list[bool](), drafter_switch.DrafterSwitch.runs

    def noted(switch: drafter_switch.DrafterSwitch) -> bool:
        used.append(runs(switch))
        return used[-1]

    monkeypatch.setattr(drafter_switch.DrafterSwitch, "runs", noted)
    for name in ("TRIAL", "FIRST_REST"):
        monkeypatch.setattr(drafter_switch, name, 4)
    return used


@pytest.mark.parametrize("name", nightly_after(len(ONE_OF_EACH_KIND), dict.fromkeys((*ONE_OF_EACH_KIND, *CASES))))
def test_no_output_changes(case_of: Made, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(name)
    want, _ = generated(case.target)
    used = uses_of_the_drafter(monkeypatch)
    adapted, _ = generated(case.target, 1, speculative_config={**case.config, "adaptive": True})
    assert {True, False} == set(used)
    tight, stats = generated(case.target, **TIGHT, speculative_config=case.config)
    assert tight == want
    assert adapted == want[: len(adapted)]
    assert stats.num_drafts > 0
    assert stats.num_preemptions or case.has_states


@pytest.mark.parametrize(
    "name",
    nightly_after(
        1, ["eagle3 of its authors", "mtp of DeepSeek-V3", "draft_model with windows", DFLASH, "mtp of Qwen3.5"]
    ),
)
def test_no_output_changes_a_step_ahead(case_of: Made, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: steps are padded, and planned before the results of the step before."""
    case = case_of(name)
    with dispatch.only(REFERENCE):
        want, _ = generated(case.target)
        monkeypatch.setattr(build, "DEPTH", {"cpu": 2})
        monkeypatch.setattr(build, "make_executor", stream_executor)
        # Without graphs there is no thread that prepares them, which is for devices that have their own kernels.
        found, stats = generated(case.target, **TIGHT, speculative_config=case.config, enforce_eager=True)
    assert tokens_of(found) == tokens_of(want)  # the log-probabilities of references depend on the batch
    assert stats.num_drafts > 0
    assert stats.num_preemptions or case.has_states


def tokens_of(results: list[Any]) -> list[Any]:
    return [output[1] for _, outputs in results for output in outputs]


def stream_executor(
    settings: Any, model: Any, storage: Any, vocab_size: int, most: Any, parts: build.ExecutorParts
) -> Any:
    same: dict[str, Any] = {
        "pooler": parts.pooler,
        "adapters": parts.adapters,
        "drafter": parts.drafter,
        "verify": parts.verify,
    }
    return StreamExecutor(model, storage, vocab_size, most, **same)


def test_a_drafter_may_be_quantised(case_of: Made) -> None:
    case = case_of("eagle3 of its authors")
    with LLM(case.target, **SETTINGS) as llm:
        want = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30))
    with LLM(case.target, **SETTINGS, speculative_config={**case.config, "quantization": "int8"}) as llm:
        found = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=30))
        assert llm.engine.stats().num_drafts > 0
    assert found[0].outputs[0].token_ids == want[0].outputs[0].token_ids


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_accepts_all_that_it_drafts_itself(case_of: Made, temperature: float) -> None:
    target = case_of("draft_model").target
    config = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 3, "adaptive": False}
    rng = random.Random(1)
    prompts = [[rng.randrange(90) for _ in range(rng.randrange(1, 60))] for _ in range(100)]
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=24, ignore_eos=True)
    with LLM(target, **{**SETTINGS, "num_kv_blocks": 400}, speculative_config=config) as llm:
        llm.generate(prompts, params)
        stats = llm.engine.stats()
    assert stats.num_accepted_drafts == stats.num_drafts > 1000


@pytest.mark.parametrize("acceptance", nightly_after(1, ("distribution", "exact")))
def test_outputs_have_the_distribution_of_the_model(tmp_path: Path, acceptance: str) -> None:
    """Three tokens from a vocabulary of three, many times."""
    model = make_checkpoint(tmp_path / "model", "llama/gqa", vocab_size=3)
    make_checkpoint(tmp_path / "draft", "qwen3/wide_heads", vocab_size=3)
    shares = {(): 1.0}
    with torch.inference_mode():
        for _ in range(3):
            last = {text: model(torch.tensor([[1, 0, *text]])).logits[0, -1].softmax(0) for text in shares}
            shares = {(*text, i): share * float(last[text][i]) for text, share in shares.items() for i in range(3)}
    num_draws, config = 8_000, {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 2}
    settings = {**SETTINGS, "max_num_seqs": 500, "max_num_batched_tokens": 2000, "num_kv_blocks": 1200}
    settings["speculative_config"] = {**config, "acceptance": acceptance, "adaptive": False}
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=3, ignore_eos=True) for seed in range(num_draws)]
    with LLM(tmp_path / "model", **settings) as llm:
        found = Counter(tuple(r.outputs[0].token_ids) for r in llm.generate([[1, 0]] * num_draws, params))
        assert 0 < llm.engine.stats().num_accepted_drafts < llm.engine.stats().num_drafts
    for text, share in shares.items():
        assert abs(found[text] / num_draws - share) <= 4.5 * math.sqrt(share * (1 - share) / num_draws)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("draft_model", {"model": ""}, "model"),
        ("draft_model", {"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ("draft_model", {"depth": 3}, "depth.*the keys of draft_model are num_speculative_tokens, adaptive"),
        ("draft_model", {"method": "medusa"}, "one of ngram, suffix, draft_model, eagle3, mtp, dflash"),
        ("draft_model", {"method": "mtp"}, "model"),
        ("draft_model", {"quantization": "int3"}, "quantization"),
        ("eagle3 of its authors", {"method": "draft_model"}, "LlamaForCausalLMEagle3"),
        ("draft_model", {"method": "eagle3"}, "fc.weight"),
    ],
)
def test_wrong_settings_are_named(case_of: Made, name: str, changes: dict[str, Any], words: str) -> None:
    case = case_of(name)
    with pytest.raises((ConfigError, CheckpointError), match=words):
        LLM(case.target, **SETTINGS, speculative_config={**case.config, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (DFLASH, {"dflash_config": "abc"}, "dflash_config is 'abc'; it must be an object"),
        (
            DFLASH,
            {"dflash_config": {"mask_token_id": 3}, "aux_hidden_state_layer_ids": 5},
            "aux_hidden_state_layer_ids is 5",
        ),
        (DFLASH, {"transformer_layer_config": [1]}, "transformer_layer_config"),
        ("eagle3 of its authors", {"eagle_config": [1]}, "eagle_config"),
    ],
)
def test_wrong_configurations_are_named(
    case_of: Made, tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    case = case_of(name)
    with pytest.raises(CheckpointError, match=f"the drafter: .*{re.escape(words)}"):
        LLM(case.target, **SETTINGS, speculative_config={**case.config, "model": changed_copy(case, tmp_path, changes)})


def changed_copy(case: Case, folder: Path, changes: dict[str, Any]) -> str:
    """A copy of a case's drafter with other keys in its configuration; those that are ``None`` are left out."""
    copy = Path(shutil.copytree(case.config["model"], folder / "draft"))
    values = json.loads((copy / "config.json").read_text()) | changes
    (copy / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(copy)


def test_an_embedding_of_fewer_tokens_than_the_model_has_is_refused(case_of: Made, tmp_path: Path) -> None:
    """Else a request would fail as soon as it has a token that the head does not know."""
    case = case_of("eagle3 of its authors")
    draft = changed_copy(case, tmp_path, {"vocab_size": VOCAB_SIZE - 1})
    weights = load_file(f"{draft}/model.safetensors")
    weights["embed_tokens.weight"] = torch.zeros(VOCAB_SIZE - 1, weights["fc.weight"].shape[0])
    save_file(weights, f"{draft}/model.safetensors")
    with pytest.raises(CheckpointError, match=r"vocab_size is .* as the model has"):
        LLM(case.target, **SETTINGS, speculative_config={**case.config, "model": draft})


def test_draft_tokens_that_the_model_does_not_have_are_refused(case_of: Made, tmp_path: Path) -> None:
    case = case_of("eagle3 of its authors")
    draft = changed_copy(case, tmp_path, {})
    weights = load_file(f"{draft}/model.safetensors")
    weights["d2t"] += VOCAB_SIZE
    save_file(weights, f"{draft}/model.safetensors")
    with pytest.raises(CheckpointError, match="d2t leads out of the model's vocabulary"):
        LLM(case.target, **SETTINGS, speculative_config={**case.config, "model": draft})


@one_in(3)
@pytest.mark.parametrize(
    "write", [compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16), gptq(4, 16)]
)
@pytest.mark.parametrize("name", ["mtp of Qwen3-Next", "mtp of GLM-4"])
def test_a_packed_mtp_layer_is_known(case_of: Made, tmp_path: Path, name: str, write: Writer) -> None:
    """Without drafts it is left out; with them no output changes."""
    quantise(case_of(name).target, tmp_path / "packed", write)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    answers = []
    for config in (None, {"method": "mtp", "adaptive": False}):
        with LLM(tmp_path / "packed", **SETTINGS, speculative_config=config) as llm:
            answers.append([result.outputs[0].token_ids for result in llm.generate([[1, 2, 3], [5, 6]], params)])
            assert (llm.engine.stats().num_drafts > 0) == (config is not None)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "config", "settings", "words"),
    [
        ("draft_model", {"model": "/nowhere"}, {}, "speculative_config: model: '/nowhere' does not exist"),
        (DFLASH, {"num_speculative_tokens": 5}, {}, "block_size, 5"),
    ],
)
def test_what_is_wrong_is_said_before_weights_are_loaded(
    case_of: Made, loading_fails: None, name: str, config: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    case = case_of(name)
    with pytest.raises(ConfigError, match=words):
        LLM(case.target, **SETTINGS, **settings, speculative_config={**case.config, **config})


def test_a_drafter_on_several_gpus_is_refused(
    case_of: Made, loading_fails: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_drafter, "is_gpu", lambda device: True)
    case = case_of("eagle3 of its authors")
    with pytest.raises(ConfigError, match='"eagle3" needs tensor_parallel_size 1 on a GPU'):
        LLM(case.target, **SETTINGS, tensor_parallel_size=2, speculative_config=case.config)


def test_a_checkpoint_without_mtp_layers_is_refused(case_of: Made, loading_fails: None) -> None:
    with pytest.raises(CheckpointError, match="no MTP layers"):
        LLM(case_of("draft_model").target, **SETTINGS, speculative_config={"method": "mtp"})


def test_an_mtp_layer_is_found(case_of: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), LLM(case_of("mtp of Qwen3-Next").target, **SETTINGS):
        assert "has an MTP layer" in caplog.text
