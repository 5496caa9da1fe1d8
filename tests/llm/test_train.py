"""``octavo.train``: an engine's own log-probabilities with gradients, against transformers in float64."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError, ConfigError, InvalidParameter
from octavo.ops import dispatch
from octavo.train import Policy, forward
from octavo.train.gradients import recorded
from tests.llm.test_weight_updates import SETTINGS
from tests.llm.tiny import write_checkpoint
from tests.models.families import make_checkpoint
from tests.tiers import nightly, nightly_after

SEQUENCES = [[5, 9, 3, 60, 2, 7, 9, 1, 8] * 3, [5, 9, 3, 60, 2, 7, 9, 1, 8, 44, 3]]
PROMPTS = [[5, 9, 3, 60, 2, 7, 9, 1, 8] * 8, [5, 9, 3], [4]]
ROWS = (
    *("llama/biases", "gemma2/capped", "hunyuan_v1_dense/late_norms", "bloom/slopes", "granite_swa/sinks"),
    *("llama/one_kv_head_tied", "llama/mha", "llama/llama3_rope", "mistral/window", "qwen2/biases", "qwen3/wide_heads"),
    *("phi3/fused", "olmo2/biases", "olmo3/two_ropes", "olmo/clipped", "glm4/rotates_a_quarter", "gemma/wide_heads"),
    *("gemma3/two_ropes", "gpt2/small", "arcee/biases", "cohere/normed_heads", "cohere2/windows", "exaone4/windows"),
    *("ernie4_5/wide_heads", "granite/factors", "nemotron/half_rotated", "seed_oss/biases", "smollm3/no_positions"),
    *("falcon/some_kv_heads", "mpt/slopes", "gpt_neox/parallel", "ministral3/growing_queries", "phi/parallel"),
    *("opt/learned_positions", "stablelm/normed_heads", "starcoder2/windows", "cwm/windows"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("model") / "a")
    make_checkpoint(folder, "llama/one_kv_head_tied", vocab_size=264)
    return folder


def gradients(policy: Policy, *, temperature: float = 1.0) -> dict[str, Tensor]:
    """Of a weighted sum of the log-probabilities of ``SEQUENCES``."""
    weighted(forward(policy, SEQUENCES, temperature=temperature)).backward()
    return {name: tensor.grad for name, tensor in policy.parameters.items() if tensor.grad is not None}


def weighted(logprobs: Sequence[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return sum((row.cpu() * torch.randn(len(row), generator=generator)).sum() for row in logprobs)


def check_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], error: float) -> None:
    """To this relative error, or that of a thousandth of the largest gradient: some are zero in truth."""
    assert found.keys() == expected.keys()
    largest = max(float(x.norm()) for x in expected.values())
    for name, x in expected.items():
        assert float((found[name].cpu().double() - x).norm()) <= error * max(float(x.norm()), largest / 1000), name


@pytest.mark.parametrize("row", nightly_after(5, ROWS))
def test_gradients_are_those_of_transformers(row: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, row).double()
    found = gradients(Policy(tmp_path, **SETTINGS))
    logits = [reference(torch.tensor([tokens[:-1]]), use_cache=False).logits[0] for tokens in SEQUENCES]
    pairs = zip(logits, SEQUENCES, strict=True)
    weighted([x.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0] for x, tokens in pairs]).backward()
    expected = {name: tensor.grad for name, tensor in reference.named_parameters() if tensor.grad is not None}
    expected = {name.replace("lm_head", "embed_out") if name not in found else name: x for name, x in expected.items()}
    check_equal(found, expected, 2e-5)


def differences(llm: LLM, policy: Policy, temperature: float = 1.0) -> float:
    """The largest between what sampling reports and the policy's log-probabilities."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(PROMPTS, outputs, strict=True)]
    largest = 0.0
    for row, prompt, output in zip(forward(policy, texts, temperature=temperature), PROMPTS, outputs, strict=True):
        pairs = zip(output.token_ids, output.logprobs or [], strict=True)
        said = torch.tensor([top[token].logprob for token, top in pairs])
        largest = max(largest, float((row[len(prompt) - 1 :].detach().cpu() - said).abs().max()))
    return largest


@pytest.mark.parametrize(
    ("row", "settings", "is_16_bits"),
    [
        ("llama/gqa", {}, True),
        ("gemma2/capped", {"logprobs_mode": "processed_logprobs"}, False),
        nightly("llama/gqa", {"dtype": "bfloat16"}, True),
        nightly("olmo2/biases", {"block_size": 16, "enforce_eager": True}, True),
        nightly("phi3/long", {}, False),
    ],
)
def test_bits_are_those_of_sampling(row: str, settings: dict[str, Any], is_16_bits: bool, tmp_path: Path) -> None:
    check_bits(row, settings, is_16_bits, tmp_path)


def check_bits(row: str, settings: dict[str, Any], is_16_bits: bool, tmp_path: Path, **sizes: int) -> None:
    """Before and after an update with the policy's weights, which are rounded to the checkpoint's type."""
    folder = write_checkpoint(tmp_path / "a")
    make_checkpoint(folder, row, vocab_size=264, **sizes)
    if is_16_bits:
        tensors = load_file(folder / "model.safetensors")
        save_file({name: x.bfloat16() for name, x in tensors.items()}, folder / "model.safetensors")
    temperature = 0.7 if settings.get("logprobs_mode") else 1.0
    with LLM(str(folder), **{**SETTINGS, **settings}) as llm:
        policy = Policy(llm)
        assert differences(llm, policy, temperature) == 0.0
        gradients(policy, temperature=temperature)
        with torch.no_grad():
            for tensor in policy.parameters.values():
                tensor -= 0.01 * tensor.grad.sign()
        assert differences(llm, policy, temperature) > 0.0
        llm.load_weights(policy.weights())
        assert differences(llm, policy, temperature) == 0.0
        llm.engine.check()


def test_layers_may_be_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same gradients to the bit, which a part of the parameters alone has, too, and logits in parts up to
    rounding."""
    kept = gradients(Policy(folder, **SETTINGS))
    again = gradients(Policy(folder, recomputes_layers=True, **SETTINGS))
    assert kept.keys() == again.keys()
    assert all(torch.equal(again[name], x) for name, x in kept.items())
    some = Policy(folder, **SETTINGS)
    for name, tensor in some.parameters.items():
        tensor.requires_grad_("layers.1.self_attn" in name)
    found = gradients(some)
    assert len(found) == 4
    assert all(torch.equal(x, kept[name]) for name, x in found.items())
    monkeypatch.setattr("octavo.train.policy.LOGITS_ROWS", 7)
    torch.testing.assert_close(gradients(Policy(folder, **SETTINGS)), kept)


def test_temperature_and_no_gradients(folder: Path) -> None:
    policy = Policy(folder, parameter_dtype=torch.bfloat16, **SETTINGS)
    assert {tensor.dtype for tensor in policy.parameters.values()} == {torch.bfloat16}
    with torch.no_grad():
        warm, plain = forward(policy, SEQUENCES, temperature=2.0), forward(policy, SEQUENCES)
    assert not warm[0].requires_grad
    assert not torch.equal(warm[0], plain[0])
    assert [len(row) for row in plain] == [len(tokens) - 1 for tokens in SEQUENCES]


def test_a_stored_copy_of_a_tied_embedding_follows_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "a")
    tensors = load_file(tmp_path / "a/model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "a/model.safetensors")
    with LLM(str(tmp_path / "a"), **SETTINGS) as llm:
        policy = Policy(llm)
        assert "lm_head.weight" not in policy.parameters
        with torch.no_grad():
            policy.parameters["model.embed_tokens.weight"] *= 1.5
        llm.load_weights(policy.weights())
        assert differences(llm, policy) == 0.0


@pytest.mark.nightly
def test_a_loop_learns(folder: Path) -> None:
    """30 steps of a policy gradient with advantages of a group, as in GRPO (arXiv 2402.03300), for tokens below 132."""
    torch.manual_seed(0)
    prompts = [[5, 9, 3, 60, 2, 7]] * 16
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, logprobs=0)
    curve = []
    with LLM(str(folder), **{**SETTINGS, "num_kv_blocks": 400}) as llm:
        policy = Policy(llm)
        optimizer = torch.optim.Adam(policy.parameters.values(), lr=1e-2)
        for _ in range(30):
            answers = [result.outputs[0] for result in llm.generate(prompts, params)]
            texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
            own = torch.stack([row[-8:] for row in forward(policy, texts)])
            said = torch.tensor([answer.cumulative_logprob for answer in answers])
            torch.testing.assert_close(own.detach().sum(1), said)
            rewards = torch.tensor([sum(token < 132 for token in answer.token_ids) / 8 for answer in answers])
            curve.append(float(rewards.mean()))
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            optimizer.zero_grad()
            (-(advantages[:, None] * own).mean()).backward()
            optimizer.step()
            llm.load_weights(policy.weights())
    assert sum(curve[:3]) / 3 < 0.7
    assert sum(curve[-3:]) / 3 > 0.95, curve


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quantization": "int8"}, "quantization: int8 has no gradients"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: fp8 has no gradients; use auto"),
        ({"load_format": "dummy"}, "load_format: dummy has no gradients"),
        ({"backend": "transformers"}, "backend: transformers has no gradients"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2 has no gradients"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], said: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        Policy(folder, **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("mixtral/two_of_five", "MixtralForCausalLM is a mixture of experts; octavo.train takes dense decoders"),
        ("mamba/alone", "MambaForCausalLM has layers without keys and values of their own"),
        ("gemma4_unified/windows", "Gemma4UnifiedForCausalLM has weights that kernels get as constants"),
    ],
)
def test_models_that_are_refused(row: str, said: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    with pytest.raises(CheckpointError, match=said):
        Policy(tmp_path, **SETTINGS)


def test_sequences_that_are_refused(folder: Path) -> None:
    policy = Policy(folder, **SETTINGS)
    for sequences, said in (
        ([], "'sequences' is empty"),
        ([[1, 2], [1]], r"sequences\[1\] has 1 tokens; 2 to 400 are allowed"),
        ([[1, 264]], r"sequences\[0\] has 264, which is not a token id from 0 to 263"),
        ([[1, True]], r"sequences\[0\] has True, which is not"),
    ):
        with pytest.raises(InvalidParameter, match=said):
            forward(policy, sequences)
    with pytest.raises(InvalidParameter, match="'temperature' must be above 0, not 0"):
        forward(policy, SEQUENCES, temperature=0)


def test_an_op_without_a_backward_pass_is_named() -> None:
    with dispatch.wrapped(recorded), pytest.raises(NotImplementedError, match="the op gated_norm has no backward"):
        dispatch.OPS.by_name["gated_norm"](torch.ones(1, 4, requires_grad=True), None, None, 0.0)
