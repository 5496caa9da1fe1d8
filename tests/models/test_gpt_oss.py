"""The published form of gpt-oss: experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import CheckpointError
from octavo.models.meta_model import outline
from octavo.models.registry import read_config
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.safetensors import SafetensorsCheckpoint
from tests.models.families import make_checkpoint
from tests.models.test_architectures import SETTINGS, random_tokens
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.thread_ranks import ranks_as_threads
from tests.tiers import nightly_after


def decode_one_by_one(blocks: Tensor, scales: Tensor) -> Tensor:
    """By the words of the specification: sign, exponent of bias 1, one bit of mantissa; no exponent is subnormal."""
    flat = []
    for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.flatten().tolist(), strict=True):
        for byte in block:
            for code in (byte % 16, byte // 16):
                sign, exponent, mantissa = code // 8, code // 2 % 4, code % 2
                value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
                flat.append((-1) ** sign * value * 2.0 ** (scale - 127))
    return torch.tensor(flat).view(*scales.shape[:-1], -1)


def random_mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    *outer, groups = shape
    blocks = torch.randint(0, 256, (*outer, groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(122, 126, (*outer, groups), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_decoded_to_the_bit(dtype: torch.dtype) -> None:
    blocks, scales = random_mxfp4(3, 5, 2)
    scales[0, 0] = torch.tensor([1, 250], dtype=torch.uint8)
    form = WeightFormat(dtype, torch.device("cpu"))
    dense = [Float4Stored(codes.flatten(1), own).dense(form) for codes, own in zip(blocks, scales, strict=True)]
    assert torch.equal(torch.stack(dense), decode_one_by_one(blocks, scales).to(dtype))


def make_packed(folder: Path, **changes: Any) -> torch.nn.Module:
    """A checkpoint in the published form, and transformers' model of the same weights."""
    model = make_checkpoint(folder, "gpt_oss/sinks", **changes)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            X, inputs, outputs = weight.shape
            blocks, scales = random_mxfp4(X, outputs, inputs // 32)
            weight.data.copy_(decode_one_by_one(blocks, scales).transpose(1, 2))
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": {"quant_method": "mxfp4"}, "experts_per_token": 3, "initial_context_length": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@torch.inference_mode()
def test_a_checkpoint_in_mxfp4_gives_what_its_widened_weights_give(tmp_path: Path) -> None:
    model, prompt = make_packed(tmp_path), random_tokens(60)
    with LLM(tmp_path, dtype="float32", **SETTINGS) as llm:
        result = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))[0]
        assert llm.info.num_parameters == sum(weight.numel() for weight in model.parameters())
    expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    for i, found in enumerate((result.prompt_logprobs or [])[1:]):
        for token, logprob in (found or {}).items():
            assert logprob.logprob == pytest.approx(expected[i, token].item(), abs=1e-4)


@needs_float_kernels
@pytest.mark.parametrize(("blocks", "size"), nightly_after(1, [(3, 2), (5, 4)]))
def test_ranks_have_whole_blocks_of_a_width_that_their_number_does_not_divide(
    blocks: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss-120b's 90 blocks of 32 among four."""
    ranks_as_threads(monkeypatch)
    make_packed(tmp_path, intermediate_size=32 * blocks)
    prompt, params = random_tokens(60), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    found = []
    for ranks in (1, size):
        with LLM(tmp_path, dtype="float32", tensor_parallel_size=ranks, **SETTINGS) as llm:
            found.append(llm.generate([prompt], params)[0].prompt_logprobs or [])
    for one, several in zip(*(rows[1:] for rows in found), strict=True):
        for token in (one or {}).keys() & (several or {}).keys():
            assert several[token].logprob == pytest.approx(one[token].logprob, abs=1e-4)


@needs_float_kernels
def test_packed_experts_are_close_to_widened_ones(tmp_path: Path) -> None:
    make_packed(tmp_path)
    prompt, params = random_tokens(60), SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    found = []
    for settings in ({}, {"dtype": "float32"}):
        with LLM(tmp_path, **SETTINGS, **settings) as llm:
            found.append(llm.generate([prompt], params)[0].prompt_logprobs or [])
    differences = [
        abs(entry.logprob - exact[token].logprob)
        for packed, exact in zip(*(rows[1:] for rows in found), strict=True)
        for token, entry in (packed or {}).items()
        if token in exact
    ]
    assert sum(differences) / len(differences) < 0.05


def test_experts_whose_inputs_are_not_whole_groups_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss/sinks", intermediate_size=40)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        X, inputs, outputs = tensors.pop(name).shape
        blocks, scales = random_mxfp4(X, outputs, inputs // 32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    checkpoint, form = SafetensorsCheckpoint(tmp_path), WeightFormat(torch.float32, torch.device("meta"))
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has 40 inputs, which are not whole groups of 32"):
        outline(read_config(checkpoint.config), checkpoint, form)


def test_another_form_of_quantised_weights_is_refused_by_name(tmp_path: Path) -> None:
    make_packed(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quark"}
    with pytest.raises(
        CheckpointError, match=r"quantization_config\.quant_method is 'quark'; it must be one of auto-round"
    ):
        read_config(config)


def test_packed_bytes_are_not_taken_for_numbers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is uint8; expected floating-point"):
        LLM(tmp_path, dtype="float32", **SETTINGS)
