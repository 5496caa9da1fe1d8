"""Every architecture against transformers, through the real engine: batches, chunks, small blocks, prefix hits."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from octavo import LLM, RequestOutput, SamplingParams
from octavo.llm.outputs import Logprob
from octavo.models.registry import ARCHITECTURES, read_config
from tests.models.families import EVERY_ROW, MAX_LEN, OWN_ROWS, ROWS, SHAPE, TELLING, VOCAB_SIZE, make_checkpoint
from tests.tiers import nightly, nightly_after, one_in

LENGTHS = (300, 1, 2, 17, 130)
NEW_TOKENS = 12
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_batched_tokens": 48, "max_num_seqs": 4, "kv_cache_memory": 0.05}


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


PROMPTS = [random_tokens(length, seed) for seed, length in enumerate(LENGTHS)]
OWN_OR_TELLING = [row if row in (*OWN_ROWS, *TELLING) else nightly(row) for row in ROWS]
"""Families on shared parts have their greedy tokens and log-probabilities compared in `make test`."""


class Made:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, folder: Path, row: str) -> None:
        self.folder = folder
        self.reference: PreTrainedModel = make_checkpoint(folder, row)
        self.known: dict[tuple[int, ...], torch.Tensor] = {}
        """Logits by tokens: several tests ask for the same."""

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Those of transformers after each of the tokens, float32 [tokens, V]."""
        key = tuple(tokens)
        if key not in self.known:
            self.known[key] = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return self.known[key]

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Natural-log probabilities from the same."""
        return self.logits(tokens).log_softmax(dim=-1)


@pytest.fixture(scope="module", params=EVERY_ROW)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("model"), request.param)


def check_logprobs(found: Sequence[Mapping[int, Logprob] | None], expected_TV: torch.Tensor) -> None:
    """Each log-probability that is told is the expected one of its row, within 1e-4."""
    told = [(row, token, entry.logprob) for row, of_row in enumerate(found) for token, entry in (of_row or {}).items()]
    rows, tokens, logprobs = zip(*told, strict=True)
    torch.testing.assert_close(torch.tensor(logprobs), expected_TV[list(rows), list(tokens)], atol=1e-4, rtol=0)


@one_in(7)
@pytest.mark.parametrize("block_size", nightly_after(1, (16, 1)))
def test_greedy_tokens_and_logprobs_are_those_of_transformers(made: Made, block_size: int) -> None:
    """A token is transformers' greedy choice if it is its best one after all the tokens before it."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
    with LLM(made.folder, dtype="float32", block_size=block_size, **SETTINGS) as llm:
        first = llm.generate(PROMPTS, params)
        longer = [prompt + list(result.outputs[0].token_ids)[:9] for prompt, result in zip(PROMPTS, first, strict=True)]
        again = llm.generate(longer, params)
        assert sum(result.num_cached_tokens for result in again) > sum(LENGTHS) // 2
    for prompt, result in zip([*PROMPTS, *longer], [*first, *again], strict=True):
        output = result.outputs[0]
        tokens = list(output.token_ids)
        assert len(tokens) == NEW_TOKENS
        expected = made.logprobs([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert tokens == expected.argmax(dim=-1).tolist()
        assert [len(found) for found in output.logprobs or []] == [5] * NEW_TOKENS
        check_logprobs(output.logprobs or [], expected)


class SpiedModel:
    """A model of which every call for logits is noted."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.norm = model.norm
        self.seen: list[torch.Tensor] = []

    def forward(self, *args: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.model.forward(*args)
        return hidden

    def logits(self, x_RD: torch.Tensor) -> torch.Tensor:
        return self.noted(self.model.logits, x_RD)

    def noted(self, compute: Callable[[torch.Tensor], torch.Tensor], x_RD: torch.Tensor) -> torch.Tensor:
        found = compute(x_RD)
        self.seen.append(found.float().clone())
        return found


def logits_of(llm: LLM, prompt: list[int]) -> tuple[torch.Tensor, RequestOutput]:
    """The raw logits of every position of a prompt, computed in chunks, float32 [tokens, V]; and its result."""
    runner: Any = llm.engine.runner
    program, reader = runner.executor._program, runner.executor._reader
    model, compute = program.model, program._logits
    program.model = reader._model = spied = SpiedModel(model)
    program._logits = partial(spied.noted, compute)
    try:
        [result] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))
    finally:
        program.model = reader._model = model
        program._logits = compute
    has_more = len(prompt) % SETTINGS["max_num_batched_tokens"] != 1
    last = spied.seen.pop(-2 if has_more else -1)  # what is sampled from comes before the rest of its chunk
    return torch.cat([*spied.seen, last]), result


@one_in(3)
@pytest.mark.parametrize("made", OWN_OR_TELLING, indirect=True)
def test_logits_and_logprobs_of_prompts_are_those_of_transformers(made: Made) -> None:
    """Every logit of every position, within 1e-4."""
    with LLM(made.folder, dtype="float32", block_size=16, **SETTINGS) as llm:
        for prompt in PROMPTS:
            found, result = logits_of(llm, prompt)
            expected = made.logits(prompt)
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
            told = (result.prompt_logprobs or [])[1:]
            assert len(told) == len(prompt) - 1
            assert all(told)
            if told:
                check_logprobs(told, expected.log_softmax(dim=-1))


@one_in(7)
@pytest.mark.parametrize("made", OWN_OR_TELLING, indirect=True)
def test_sixteen_bits_are_as_good_as_those_of_transformers(made: Made) -> None:
    """The mean error of bfloat16 logits is at most half as much again as that of transformers' own."""
    prompt = PROMPTS[-1]
    exact = made.logits(prompt)
    with LLM(made.folder, dtype="bfloat16", **SETTINGS) as llm:
        ours = (logits_of(llm, prompt)[0] - exact).abs().mean().item()
    with torch.inference_mode():
        rounded = copy.deepcopy(made.reference).to(torch.bfloat16)
        for name, weight in rounded.named_parameters():
            if any(part in name for part in rounded._keep_in_fp32_modules_strict or ()):
                weight.data = weight.data.float()
        theirs = (rounded(torch.tensor([prompt]), use_cache=False).logits[0].float() - exact).abs().mean().item()
    assert 0 < ours < 1.5 * theirs


def test_every_key_that_transformers_writes_is_known(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(json.loads((made.folder / "config.json").read_text()))
    assert not caplog.records
    assert config.architecture in ARCHITECTURES


ELSEWHERE = (
    *("DeepseekForCausalLM", "ChatGLMForCausalLM", "DeciLMForCausalLM", "ExaoneForCausalLM"),
    *("InternLM2ForCausalLM", "InternLM3ForCausalLM", "MiMoForCausalLM"),
)
"""Which the library does not have; ``test_vision.py`` has the first as DeepSeek-OCR's text part, ``test_own_code.py``
the others."""


def test_every_architecture_has_a_row() -> None:
    made = {AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(kind))] for kind, _ in ROWS.values()}
    names = {model.__name__ for model in made}
    assert names <= set(ARCHITECTURES)
    assert {ARCHITECTURES[name] for name in {*names, *ELSEWHERE}} == set(ARCHITECTURES.values())


@pytest.mark.parametrize("row", ["granitemoe/stacked", "granitemoehybrid/experts"])
def test_stacked_experts_as_wide_as_the_model(row: str, tmp_path: Path) -> None:
    """Their shapes do not tell which dimension is which."""
    model = make_checkpoint(tmp_path, row, intermediate_size=SHAPE["hidden_size"])
    check_logits(tmp_path, model, PROMPTS[3])


@pytest.mark.parametrize("width", [SHAPE["hidden_size"], SHAPE["hidden_size"] // 2])
def test_stacked_experts_of_which_one_tensor_is_square(width: int, tmp_path: Path) -> None:
    """Qwen3.5 is published with stacked experts, which transformers writes one by one unless asked."""
    model = make_checkpoint(tmp_path, "qwen3_5_moe/experts", moe_intermediate_size=width)
    model.save_pretrained(tmp_path, save_original_format=False)
    check_logits(tmp_path, model, PROMPTS[3])


@pytest.mark.parametrize(("row", "activation"), [("llama/gqa", "gelu_fast"), ("phi/parallel", "silu")])
def test_activations_that_no_row_has(row: str, activation: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, row, hidden_act=activation)
    check_logits(tmp_path, model, PROMPTS[3])


def test_a_family_of_another_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entry point is the name of the architecture; here it is Llama under another name."""
    source = tmp_path / "site" / "doubled.py"
    source.parent.mkdir()
    source.write_text(
        "from octavo.models.decoder import Decoder, read_decoder\n\n\n"
        "class Doubled(Decoder):\n"
        "    @classmethod\n"
        "    def read_config(cls, keys, max_len):\n"
        "        return read_decoder(keys, max_len)\n"
    )
    told = source.parent / "doubled-1.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: doubled\nVersion: 1\n")
    (told / "entry_points.txt").write_text("[octavo.models]\nDoubledForCausalLM = doubled:Doubled\n")
    monkeypatch.syspath_prepend(source.parent)
    model = make_checkpoint(tmp_path / "model", "llama/biases")
    values = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**values, "architectures": ["DoubledForCausalLM"]}))
    check_logits(tmp_path / "model", model, PROMPTS[3])


def check_logits(folder: Path, model: PreTrainedModel, prompt: list[int]) -> None:
    """Those of a checkpoint are those that transformers computes with ``model``, within 1e-4."""
    with LLM(folder, dtype="float32", **SETTINGS) as llm:
        found, _ = logits_of(llm, prompt)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_table_knows_prompts_within_the_context() -> None:
    assert max(LENGTHS) + 9 + NEW_TOKENS <= MAX_LEN


def test_falcon_with_biases_by_distance(tmp_path: Path) -> None:
    """The first Falcons: prompts of at most 256 tokens, up to which transformers rounds no distance to bfloat16."""
    config = AutoConfig.for_model("falcon", **SHAPE, alibi=True, multi_query=False, parallel_attn=False, bias=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    with LLM(tmp_path, dtype="float32", block_size=16, **SETTINGS) as llm:
        prompt = random_tokens(250)
        [result] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3))
    tokens = list(result.outputs[0].token_ids)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    check_logprobs(result.outputs[0].logprobs or [], logits.log_softmax(-1)[len(prompt) - 1 : -1])


def test_rows_that_fill_up_inklings_map_to_logits_are_no_tokens(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "inkling_text/plain", unpadded_vocab_size=5)
    params = SamplingParams(temperature=1, seed=1, max_tokens=24, ignore_eos=True, logprobs=3)
    with LLM(tmp_path, dtype="float32", block_size=16, **SETTINGS) as llm:
        [result] = llm.generate([PROMPTS[3]], params)
    tokens = list(result.outputs[0].token_ids)
    assert max(tokens) < 5
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPTS[3], *tokens]]), use_cache=False).logits[0]
    assert logits.shape[1] == 5
    check_logprobs(result.outputs[0].logprobs or [], logits.log_softmax(-1)[len(PROMPTS[3]) - 1 : -1])


def test_qwen4_without_an_indexer_attends_to_all_positions(tmp_path: Path) -> None:
    """As with one that may choose all of them: transformers makes no model without, though its configuration may be."""
    model = make_checkpoint(tmp_path, "qwen4_exp_text/plain", indexer_budget=6 * MAX_LEN)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in weights.items() if ".indexer." not in name}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    changed = {key: None if key.startswith("indexer_") else value for key, value in config.items()}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with LLM(tmp_path, dtype="float32", block_size=16, **SETTINGS) as llm:
        found, _ = logits_of(llm, PROMPTS[4])
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPTS[4]]), use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
