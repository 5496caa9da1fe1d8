"""Every GGUF architecture against transformers: files written by llama.cpp's package, read through the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from octavo import LLM, SamplingParams
from octavo.build import build_engine as build
from octavo.errors import CheckpointError
from octavo.models.registry import load_model, read_config
from octavo.ops.collective import SingleRank
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf.gguf_checkpoint import ALL_FAMILIES
from octavo.weights.gguf.gguf_reader import GGUFFile
from tests.models import families, gguf_files
from tests.models.families import make_checkpoint, rope
from tests.models.gguf_decoder_files import WRITTEN
from tests.models.gguf_files import ARCHITECTURES, Array, write_gguf
from tests.models.test_architectures import SETTINGS, random_tokens
from tests.ops.cpu_cases import needs_float_kernels, random_blocks
from tests.tiers import nightly_after, one_in

ROWS: dict[str, dict[str, Any]] = {
    "llama/gqa": {},
    "llama/biases": {},
    "llama/llama3_rope": {},
    "llama/linear_rope": {},
    "llama/yarn": {},
    "mixtral/two_of_five": {},
    "qwen2/biases": {},
    "qwen3/wide_heads": {},
    "qwen2_moe/shared": {},
    "qwen3_moe/normalised": {},
    "phi3/fused": {},
    "phi3/short": {"sliding_window": None},
    "olmo2/one_kv_head": {},
    "gemma/wide_heads": {},
    "gemma2/capped": {"query_pre_attn_scalar": 16},
    "gemma3/two_ropes": {"query_pre_attn_scalar": 16},
    "gemma4/own_embeddings": {},
    "gemma4/experts": {},
    "glm4/biases": {},
    "glm4/rotates_a_quarter": {},
    "gpt2/small": {},
    "gpt_oss/sinks": {},
    "deepseek_v2/lite": {},
    "deepseek_v2/groups": {
        "attention_bias": False,
        **rope("yarn", factor=4.0, original_max_position_embeddings=100, mscale=0.7, mscale_all_dim=0.7),
    },
    "deepseek_v3/groups": {},
    "deepseek_v3/half_split": {"rope_interleave": True},
    "glm_moe_dsa/shared": {},
    "qwen3_next/experts": {},
    "qwen3_5/dense": {},
    "qwen3_5_moe/experts": {"linear_num_value_heads": 6},
    "lfm2/conv": {"block_auto_adjust_ff_dim": False},
    "lfm2/biases": {},
    "lfm2_moe/experts": {},
    "mamba/alone": {},
    "falcon_mamba/norms": {},
    "mamba2/alone": {},
    "mamba2/biases": {},
    "nemotron_h/experts": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]
    },
    "nemotron_h/latent_experts": {"n_group": 1},
    "nemotron_h/dense": {},
    "granitemoehybrid/experts": {},
    "granitemoehybrid/dense_with_rope": {},
    "falcon_h1/factors": {},
    "falcon_h1/gated_first": {"attention_bias": False, "mlp_bias": False},
    "jamba/experts": {},
    "jamba/dense": {},
    "kimi_linear/experts": {},
    "afmoe/gated": {},
    "apertus/learned_activation": rope("default"),
    "mistral4/growing_queries": {},
    "youtu/latent": {},
    "arcee/biases": {},
    "bailing_moe_v2/groups": {},
    "bloom/slopes": {},
    "cohere/normed_heads": {},
    "cohere2/windows": {"num_hidden_layers": 5, "layer_types": None},
    "cohere2_moe/shared": {},
    "cohere2_moe/sigmoid": {},
    "dots1/windows": {"sliding_window": None, "layer_types": None},
    "ernie4_5/wide_heads": {},
    "ernie4_5_moe/some_layers": {},
    "exaone4/full": {},
    "exaone4/windows": {},
    "exaone_moe/groups": {},
    "falcon/one_kv_head": {},
    "falcon/two_norms": {},
    "falcon/some_kv_heads": {},
    "glm/fused": {},
    "glm4_moe/groups": {},
    "glm4_moe/normed_heads": {},
    "gpt_neox/parallel": {},
    "gpt_neox/sequential": {},
    "granite/factors": {},
    "granitemoe/stacked": {},
    "granitemoeshared/shared": {},
    "hunyuan_v1_dense/alpha": {},
    "hunyuan_v1_dense/late_norms": {},
    "hunyuan_v1_moe/shared": {},
    "hy_v3/shared": {},
    "jais2/biases": {},
    "laguna/gated_heads": {},
    "mellum/windows": {"mlp_layer_types": ["sparse"] * 3},
    "llama4/scaled_inputs": {
        **dict.fromkeys(("no_rope_layers", "layer_types", "moe_layers")),
        "num_hidden_layers": 5,
        "floor_scale": 8192,
    },
    "mimo_v2_flash/narrow_values": {},
    "minicpm/factors": {},
    "minimax_m2/partly_rotated": {},
    "ministral3/growing_queries": {},
    "mpt/slopes": {},
    "nemotron/half_rotated": {},
    "olmo/clipped": {"attention_bias": False},
    "olmo3/two_ropes": {},
    "olmoe/clipped": {"clip_qkv": None},
    "phi/parallel": {},
    "phimoe/chosen_in_turn": {"router_jitter_noise": 0.01},
    "seed_oss/biases": {},
    "smollm3/windows": {
        **dict.fromkeys(("sliding_window", "layer_types", "no_rope_layers")),
        "num_hidden_layers": 5,
        "use_sliding_window": False,
    },
    "stablelm/biases": {},
    "stablelm/parallel": {},
    "stablelm/normed_heads": {},
    "starcoder2/windows": {},
    "step3p5/limited": {},
}
"""Rows of checkpoints, with what a file cannot say left at the family's default."""
PROMPTS = [random_tokens(length, seed) for seed, length in enumerate((90, 1, 40))]


def check(path: Path, reference: PreTrainedModel, tolerance: float = 1e-4) -> None:
    """Log-probabilities of prompts read from the file are transformers' own."""
    with LLM(path, dtype="float32", tokenizer=None, **SETTINGS) as llm:
        results = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))
    for prompt, result in zip(PROMPTS, results, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt]), use_cache=False).logits[0].log_softmax(dim=-1)
        for i, found in enumerate((result.prompt_logprobs or [])[1:]):
            for token, logprob in (found or {}).items():
                assert logprob.logprob == pytest.approx(expected[i, token].item(), abs=tolerance)


@one_in(5)
@pytest.mark.parametrize("row", ROWS)
def test_a_file_gives_what_its_checkpoint_gives(row: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, row, **ROWS[row])
    check(write_gguf(tmp_path, model), model)


@pytest.mark.parametrize("row", ["glm/fused", "phi/parallel", "llama/gqa"])
def test_queries_keys_and_values_in_one_tensor(row: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, row, **ROWS[row])
    check(write_gguf(tmp_path, model, fuses_queries=True), model)


def test_mistral_small_3_is_mistral3_without_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "llama", "MISTRAL3")
    model = make_checkpoint(tmp_path, "llama/gqa")
    check(write_gguf(tmp_path, model), model)


@pytest.mark.parametrize("name", ["INTERNLM2", "EXAONE"])
def test_llama_by_other_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which EXAONE's queries and keys are in the order of checkpoints."""
    monkeypatch.setitem(ARCHITECTURES, "llama", name)
    if name == "EXAONE":
        monkeypatch.setattr(gguf_files, "_one", lambda kind, config, name, tensor: {name: tensor})
    model = make_checkpoint(tmp_path, "llama/llama3_rope")
    check(write_gguf(tmp_path, model), model)


def test_every_architecture_has_a_row() -> None:
    kinds = {families.ROWS[row][0] + "_dense" * (row == "nemotron_h/dense") for row in ROWS}
    names = {WRITTEN.get(kind, gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, ARCHITECTURES[kind])]) for kind in kinds}
    others = {"qwen2vl", "qwen3vl", "qwen3vlmoe"}  # which are in test_projector.py
    assert names | others | {"exaone", "internlm2"} == set(ALL_FAMILIES)


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_5/dense")
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    save_file({**tensors, "mtp.fc.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    check(write_gguf(tmp_path, model), model)


@needs_float_kernels
def test_blocks_wider_than_the_heads_of_a_recurrence(tmp_path: Path) -> None:
    """Value heads are in another order in files of Qwen3.5, and columns of blocks cannot be put into the model's."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = make_checkpoint(tmp_path, "qwen3_5/dense", **sizes, initializer_range=0.05)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path, model, lambda name, values: kind if values.ndim > 1 and "conv" not in name else None)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
    with torch.inference_mode():
        exact = model(torch.tensor([PROMPTS[0]]), use_cache=False).logits[0].log_softmax(dim=-1)
    for dtype in ("auto", "float32"):
        with LLM(path, dtype=dtype, tokenizer=None, **SETTINGS) as llm:
            told = llm.generate([PROMPTS[0]], params)[0].prompt_logprobs
        apart = [abs(entry.logprob - exact[i, t].item()) for i, of in enumerate(told[1:]) for t, entry in of.items()]
        assert np.mean(apart) < 0.05


def test_ranks_do_not_divide_tiled_heads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path, make_checkpoint(tmp_path, "qwen3_5/dense"))
    checkpoint = open_checkpoint(path)
    form = WeightFormat(torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match=r"out_proj: the heads of its inputs are not in order"):
        load_model(read_config(checkpoint.config), checkpoint, form, collective=OneOfTwo())


class OneOfTwo(SingleRank):
    size = 2


@pytest.mark.parametrize(
    ("row", "form"), [("mixtral/two_of_five", "Q8_0"), ("qwen3_moe/normalised", "Q4_0"), ("gpt_oss/sinks", "MXFP4")]
)
def test_quantised_experts(row: str, form: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[form]

    def quantise(name: str, values: Array) -> gguf.GGMLQuantizationType | None:
        return kind if "_exps.weight" in name else None

    size = {"moe_intermediate_size": 32} if row.startswith("qwen3") else {"intermediate_size": 32}
    model = make_checkpoint(tmp_path, row, **size)
    path = write_gguf(tmp_path, model, quantise)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                is_input_first = row.startswith("gpt_oss")
                rows = (weight.transpose(1, 2) if is_input_first else weight).contiguous().numpy()
                exact = torch.from_numpy(
                    gguf.quants.dequantize(gguf.quants.quantize(rows, kind), kind).astype(np.float32)
                )
                weight.copy_(exact.transpose(1, 2) if is_input_first else exact)
    check(path, model)


FEW_BITS = ("Q2_K", "IQ4_XS", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL")


@pytest.mark.parametrize("kind", nightly_after(2, (*FEW_BITS, "TQ1_0", "TQ2_0", "NVFP4")))
def test_a_file_of_few_bits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random blocks, as the package has no quantisation to them."""
    model = make_checkpoint(tmp_path, "llama/gqa", hidden_size=256, intermediate_size=256)
    form = gguf.GGMLQuantizationType[kind]
    made: list[Array] = []

    def blocks(values: Array, form: gguf.GGMLQuantizationType) -> Array:
        made.append(random_blocks(kind, *values.shape, seed=len(made)).data)
        return made[-1]

    monkeypatch.setattr(gguf.quants, "quantize", blocks)
    path = write_gguf(tmp_path, model, lambda name, values: form if "ffn_" in name and values.ndim > 1 else None)
    names = [name for name in load_file(tmp_path / "model.safetensors") if ".mlp." in name]
    assert len(names) == len(made) == 6
    with torch.no_grad():
        for name, data in zip(names, made, strict=True):
            model.get_parameter(name).copy_(torch.from_numpy(gguf.quants.dequantize(data, form)))
    check(path, model, 1e-3)  # of logits around 17


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "blk.1.attn_output.weight", "blk.1.ffn_down_exps.weight"])
def test_an_infinite_scale_is_refused(tmp_path: Path, name: str, dtype: str) -> None:
    """In blocks that stay packed and in those that are made dense."""
    model = make_checkpoint(tmp_path, "mixtral/two_of_five", intermediate_size=32)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path, model, lambda name, values: kind if values.ndim > 1 and "inp" not in name else None)
    tensor, data = GGUFFile.open(path).tensors[name], bytearray(path.read_bytes())
    last = tensor.offset + tensor.nbytes - 34
    data[last : last + 2] = np.array([np.inf], dtype="<f2").tobytes()
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"tensor .*{name}.* has scales that are infinite or not numbers"):
        LLM(path, dtype=dtype, tokenizer=None, **SETTINGS)


@needs_float_kernels
def test_experts_stay_in_their_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a dtype is asked for; and what says so does not change from one process to the next."""
    said: list[str] = []
    monkeypatch.setattr(build, "make_offload", lambda settings, storage, copies, path, forms, room: said.append(forms))
    model = make_checkpoint(tmp_path, "mixtral/two_of_five", intermediate_size=32)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path, model, lambda name, values: kind if values.ndim > 1 and "inp" not in name else None)
    found = []
    for dtype in ("auto", "float32"):
        with LLM(path, dtype=dtype, tokenizer=None, **SETTINGS) as llm:
            result = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5))[0]
            found.append((llm.info.memory["weights"], result.prompt_logprobs))
    (packed_bytes, packed), (dense_bytes, dense) = found
    assert packed_bytes < dense_bytes // 2
    pairs = [(ours, exact) for ours, exact in zip(packed[1:], dense[1:], strict=True)]
    apart = [abs(ours[t].logprob - exact[t].logprob) for ours, exact in pairs for t in set(ours) & set(exact)]
    assert len(apart) > 300
    assert np.mean(apart) < 0.05
    assert said[0] != said[1]
    assert "0x" not in said[0] + said[1]
