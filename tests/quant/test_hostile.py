"""Quantised checkpoints that are wrong: each is refused with what is wrong, at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM
from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.methods import read_method
from tests.models.families import make_checkpoint
from tests.models.test_architectures import SETTINGS
from tests.quant.sources import module
from tests.quant.writers import (
    Writer,
    awq,
    bitnet,
    bitsandbytes_int8,
    compressed,
    fp8,
    gptq,
    modelopt_fp8,
    modelopt_nvfp4,
    quantise,
)

Q = "model.layers.0.self_attn.q_proj"
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False)
INT4_IN_BYTES = compressed("int-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False)
NVFP4 = modelopt_nvfp4()
MXFP4 = compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
Damage = Callable[[dict[str, Tensor], dict[str, Any]], None]


def tensor(part: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{Q}.{part}"] = change(tensors[f"{Q}.{part}"]).contiguous()

    return damage


def setting(**values: Any) -> Damage:
    return lambda tensors, config: config.update(values)


def put(index: Any, value: Any) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor[index] = value
        return tensor

    return change


CASES: dict[str, tuple[Writer, Damage, str]] = {
    "too few words": (
        gptq(4, 16),
        tensor("qweight", lambda t: t[1:]),
        r"qweight': has shape \(7, 64\), expected \(8, 64\)",
    ),
    "words of floats": (gptq(4, 16), tensor("qweight", lambda t: t.float()), "qweight is float32; expected int32"),
    "other bits than said": (gptq(4, 16), setting(bits=8), r"qweight': has shape \(8, 64\), expected \(16, 64\)"),
    "a group that does not divide": (gptq(4, 16), setting(group_size=24), "has 64 inputs, .* not whole groups of 24"),
    "a scale that is no number": (
        gptq(4, 16),
        tensor("scales", put(0, float("nan"))),
        "scales that are infinite or not",
    ),
    "an infinite scale": (awq(16), tensor("scales", put(0, float("inf"))), "scales that are infinite or not numbers"),
    "a group that is not there": (gptq(4, 16), tensor("g_idx", put(3, 4)), "groups that are not from 0 to 3"),
    "a negative group": (gptq(4, 16), tensor("g_idx", put(3, -2)), "groups that are not from 0 to 3"),
    "a group that is too large": (gptq(4, 16), tensor("g_idx", put(slice(0, 20), 0)), "does not assign 16 inputs"),
    "zero points of other groups": (
        gptq(4, 16),
        tensor("qzeros", lambda t: t[:2]),
        r"qzeros': has shape \(2, 8\), expected ",
    ),
    "awq's zero points": (
        awq(16),
        tensor("qzeros", lambda t: t[:, :3]),
        r"qzeros': has shape \(4, 3\), expected \(4, 8\)",
    ),
    "a number that is not ternary": (bitnet(), tensor("weight", put((0, 0), 3)), "numbers other than -1, 0 and 1"),
    "packed shape": (INT4, tensor("weight_shape", put(0, 1 << 40)), r"weight_shape is not \(64, 64\)"),
    "packed words": (
        INT4,
        tensor("weight_packed", lambda t: t[:, :4]),
        r"weight_packed': has shape \(64, 4\), expected ",
    ),
    "packed zeros": (
        INT4,
        tensor("weight_zero_point", lambda t: t[:4]),
        r"weight_zero_point': has shape \(4, 4\), expected ",
    ),
    "packed scales": (
        INT4,
        tensor("weight_scale", lambda t: t[:, :1]),
        r"weight_scale': has shape \(64, 1\), expected ",
    ),
    "zero points that are out of range": (
        INT4_IN_BYTES,
        tensor("weight_zero_point", put(0, 8)),
        "weight_zero_point has zero points that are not from -8 to 7",
    ),
    "zero points of another type": (
        INT4_IN_BYTES,
        tensor("weight_zero_point", lambda t: t.float()),
        "weight_zero_point is float32; expected int8",
    ),
    "zero points of a symmetric group": (
        INT4,
        lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(symmetric=True),
        "weight_zero_point",
    ),
    "scales of blocks": (
        fp8(32, 32),
        tensor("weight_scale_inv", lambda t: t[:1]),
        r"weight_scale_inv': has shape \(1, 2\), expected ",
    ),
    "blocks of another size": (
        fp8(32, 32),
        setting(weight_block_size=[128, 32]),
        r"weight_scale_inv': has shape \(2, 2\), expected ",
    ),
    "no 8-bit floats": (fp8(), tensor("weight", lambda t: t.float()), "weight is float32; expected float8_e4m3fn"),
    "a scale of activations": (fp8(), tensor("input_scale", lambda t: t * float("nan")), "input_scale has scales that"),
    "scales of fp4": (
        NVFP4,
        tensor("weight_scale", lambda t: t[:, :2]),
        r"weight_scale': has shape \(64, 2\), expected ",
    ),
    "a scale of a tensor": (NVFP4, tensor("weight_scale_2", lambda t: -t), "weight_scale_2 is not positive"),
    "an exponent that is no number": (
        MXFP4,
        tensor("weight_scale", put(0, 255)),
        "weight_scale has scales that are not",
    ),
    "huge blocks": (fp8(32, 32), setting(weight_block_size=[1 << 60, 1 << 60]), "weight_block_size is .* two positive"),
    "no groups": (INT4, setting(config_groups={}), "config_groups is {}; it must be an object with at least one group"),
    "rotated": (INT4, setting(transform_config={"config_groups": {"R1": {}}}), "Hadamard transforms"),
}


MISSING: dict[str, tuple[Writer, str]] = {
    "scales of packed integers": (INT4, "weight_scale"),
    "scales of integers in bytes": (INT4_IN_BYTES, "weight_scale"),
    "packed integers": (INT4, "weight_packed"),
    "a scale of a tensor": (fp8(), "weight_scale"),
    "scales of blocks": (fp8(32, 32), "weight_scale_inv"),
    "modelopt's scale": (modelopt_fp8(), "weight_scale"),
    "scales of groups": (NVFP4, "weight_scale"),
    "a second scale": (NVFP4, "weight_scale_2"),
    "exponents": (MXFP4, "weight_scale"),
    "scales of bitsandbytes": (bitsandbytes_int8(), "SCB"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_tensor_that_is_missing_is_named(case: str) -> None:
    writer, part = MISSING[case]
    written, _ = writer.write(torch.randn(64, 64))
    del written[part]
    with pytest.raises(CheckpointError, match=rf"q_proj\.{part} is missing; expected one of shape \["):
        read_method(writer.config).matrix(Q, (64, 64), Tensors(module(Q, written)), False)


@pytest.mark.parametrize("case", CASES)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    writer, damage, message = CASES[case]
    source, folder = tmp_path / "source", tmp_path / "quantised"
    make_checkpoint(source, "llama/gqa", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    quantise(source, folder, writer)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    damage(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    begin = time.process_time()
    with pytest.raises(CheckpointError, match=message):
        LLM(folder, **SETTINGS)
    assert time.process_time() - begin < 2


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "quantised"
    make_checkpoint(source, "llama/gqa", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    quantise(source, folder, gptq(4, 16))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    begin = time.process_time()
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        LLM(folder, **SETTINGS)
    assert time.process_time() - begin < 2


def test_a_module_that_no_group_targets_is_named(tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "quantised"
    make_checkpoint(source, "llama/gqa", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    [(_, group)] = INT4.config["config_groups"].items()
    config = {**INT4.config, "config_groups": {"group_0": {**group, "targets": ["re:.*mlp.*"]}}}
    quantise(source, folder, Writer(config, INT4.write))
    with pytest.raises(CheckpointError, match=r"q_proj is quantised, but no group of quantization_config targets it"):
        LLM(folder, **SETTINGS)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed_config(**changes: Any) -> dict[str, Any]:
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    return {**config, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 5}, r"quantization_config\.bits is 5; it must be 2 or 3 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1}, r"group_size is 1; it must be -1 \(one group\) or"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, r"checkpoint_format is 'marlin'.*Convert it"),
        ({"quant_method": "gptq", "rotation": "hadamard"}, r"rotation is hadamard: rotation of activations is not"),
        ({"quant_method": "gptq", "dynamic": {"+:(": {}}}, r"dynamic: '\(' is not a pattern"),
        ({"quant_method": "gptq", "dynamic": {"-:(a+)+x": {}}}, r"dynamic: '\(a\+\)\+x' has repeated groups or more"),
        ({"quant_method": "gptq", "dynamic": {"+:a": {"bits": 9}}}, r"dynamic\.\+:a\.bits is 9"),
        ({"quant_method": "awq", "version": "gemv"}, r"version is 'gemv'; it must be gemm\. Use a checkpoint"),
        ({"quant_method": "awq", "bits": 8}, r"bits is 8; it must be 4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt is 'e5m2'; it must be e4m3"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo is 'W4A8_AWQ'; it must be FP8 or"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "INT4_AWQ"}},
            r"quantization\.quant_algo is 'INT4",
        ),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, r"format is 'marlin-24'; it must be pack-quan"),
        (
            {**compressed_config(), "sparsity_config": {"format": "sparse-24-bitmask"}},
            r"Sparse weights \(2:4\) are not",
        ),
        (
            {**compressed_config(), "config_groups": {"MXFP6A16": ["Linear"]}},
            r"config_groups\.MXFP6A16 is a list; such a group must be one of the presets UNQUANTIZED or W2A16 or",
        ),
        (
            compressed_config(strategy="block", block_structure="128x0"),
            r"block_structure is '128x0'; it must be a list",
        ),
        (compressed_config(num_bits=16), r"group_0\.weights\.num_bits is 16; it must be from 2 to 8"),
        (compressed_config(group_size=3), r"weights\.group_size is 3; it must be from 8 to"),
        (compressed_config(strategy="attn_head"), r"weights\.strategy is 'attn_head'; it must be tensor or channel"),
        (compressed_config(type="float"), r"weights\.num_bits is 4; it must be what the format pack-quantized holds"),
    ],
)
def test_a_configuration_is_refused_before_a_weight_is_read(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_method(config)
