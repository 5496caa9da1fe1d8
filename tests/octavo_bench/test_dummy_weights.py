"""Random weights that are written to files are a checkpoint to other engines, too, and what a dummy has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.models.registry import load_model, read_config
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.formats.mxfp4 import MXFP4
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.dummy import DummyCheckpoint
from octavo.weights.safetensors import read_configs
from octavo_bench import dummy_models
from octavo_bench.dummy_models import write_weights
from octavo_fleet.sim.shapes import SHAPES

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
NAMES = ["llama-3.2-1b", "qwen3-8b", "gemma-3-1b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_finds_every_tensor(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    small = {key: value for key, value in {**SMALL, **EXPERTS, **LATENT}.items() if key in SHAPES[name]}
    if "kv_lora_rank" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "layer_types" in SHAPES[name]:
        small["layer_types"] = SHAPES[name]["layer_types"][:2]
    for key in ("num_experts_per_tok", "first_k_dense_replace"):
        small |= {key: min(2, SHAPES[name][key])} if key in SHAPES[name] else {}
    config = {**SHAPES[name], **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(dummy_models, "SHARD_BYTES", 20_000)
    total = write_weights(tmp_path)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert total == sum(path.stat().st_size - header(path) for path in tmp_path.glob("*.safetensors"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    written, dummy = open_checkpoint(tmp_path, "auto"), DummyCheckpoint(*read_configs(tmp_path), 0)
    for tensor in written.names():
        found = written.load(tensor, written.describe(tensor)[1])
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, dummy.load(tensor, tuple(found.shape)))


def test_experts_in_mxfp4_are_read_as_packed_groups(tmp_path: Path) -> None:
    """And what is not quantised is as in bfloat16."""
    small = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    config = {**SHAPES["gpt-oss-20b-mxfp4"], **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_weights(tmp_path)
    written = open_checkpoint(tmp_path, "auto")
    form = WeightFormat(torch.float32, torch.device("meta"), packs=True, outlined_for="cpu")
    found = load_model(read_config(written.config), written, form)
    numbers = 2 * 4 * 3 * SMALL["hidden_size"] * SMALL["intermediate_size"]
    assert numbers < found.bytes_by_format["float4"] < 1.1 * numbers, "a CPU packs them as integers of 8 bits"
    name, shape = "model.layers.1.mlp.experts.down_proj", (4, SMALL["hidden_size"], SMALL["intermediate_size"])
    stored = MXFP4.read(config["quantization_config"]).stack(name, shape, Tensors(written), is_transposed=True)
    assert all(0.02 < expert.packed_groups(torch.device("cpu")).unpack().std() < 0.025 for expert in stored)


def test_other_quantised_forms_are_refused(tmp_path: Path) -> None:
    config = {**SHAPES["llama-3.2-1b"], "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="'fp8' is not written"):
        write_weights(tmp_path)


def header(path: Path) -> int:
    """Bytes of a safetensors file before its tensors."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")
