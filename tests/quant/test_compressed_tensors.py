"""Modules written by the compressed-tensors library, read to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_range
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.formats.compressed_tensors import CompressedTensors
from octavo.quant.formats.plain import Plain
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import WeightFormat
from tests.quant.sources import module

NAME = "model.layers.0.self_attn.q_proj"
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float"}
CPU = torch.device("cpu")


def write(form: str, weights: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype) -> tuple[Any, Any, Tensor]:
    """The configuration, the tensors of a module, and the matrix as the library reads them."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    args, (N, K) = scheme.weights, shape
    torch.manual_seed(N * K)
    weight = torch.randn(shape, dtype=dtype) * torch.rand(N, 1, dtype=dtype)
    width = args.group_size if args.strategy in ("group", "tensor_group") else K
    height = 1 if args.strategy != "tensor" else N
    if args.strategy == "block":
        height, width = args.block_structure
    rows, columns = -(-N // height), -(-K // width)
    low, high = calculate_range(args, CPU)
    scale = (torch.rand(rows, columns) * 0.02 + 0.01).to(dtype)
    given = {"weight": weight, "weight_scale": scale.reshape(1) if scale.numel() == 1 else scale}
    if not args.symmetric:
        given["weight_zero_point"] = torch.randint(int(low), int(high) + 1, (rows, columns)).to(torch.int8)
    if form.startswith("nvfp4"):
        given["weight_global_scale"] = torch.tensor([37.3])
        given["weight_scale"] = (torch.rand(rows, columns) * 20).to(torch.float8_e4m3fn).float()
    if form.startswith("mx"):
        given["weight_scale"] = torch.exp2(torch.randint(-9, 0, (rows, columns)).float()).to(dtype)
    compressor = BaseCompressor.get_value_from_registry(form)
    written = compressor.compress(given, scheme)
    expected = compressor.decompress(written, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args.model_dump(mode="json")}},
        "ignore": ["lm_head"],
    }
    return config, written, expected


CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int], type]] = {
    "int4, groups of 128": ("pack-quantized", INT4, (48, 256), GroupedStored),
    "int4, a scale for each output": (
        "pack-quantized",
        {**INT4, "strategy": "channel", "group_size": None},
        (24, 80),
        GroupedStored,
    ),
    "int4, zeros": ("pack-quantized", {**INT4, "group_size": 32, "symmetric": False}, (40, 96), GroupedStored),
    **{
        f"int{bits}, zeros, outputs and inputs that do not fill words": (
            "pack-quantized",
            {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 20, "symmetric": False},
            (13, 60),
            GroupedStored,
        )
        for bits in range(2, 9)
    },
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, (24, 72), GroupedStored),
    "int8, one scale": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}, (24, 72), GroupedStored),
    "int8, zeros": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 24, "symmetric": False},
        (24, 72),
        GroupedStored,
    ),
    "int4 in bytes": ("naive-quantized", INT4, (16, 256), GroupedStored),
    "fp8, one scale": ("float-quantized", {**FP8, "strategy": "tensor"}, (24, 72), ScaledStored),
    "fp8, a scale for each output": ("float-quantized", {**FP8, "strategy": "channel"}, (24, 72), ScaledStored),
    "fp8, groups": ("float-quantized", {**FP8, "strategy": "group", "group_size": 32}, (24, 96), ScaledStored),
    "fp8, blocks": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [128, 128]},
        (256, 384),
        ScaledStored,
    ),
    "fp8, blocks that do not divide": (
        "naive-quantized",
        {**FP8, "strategy": "block", "block_structure": [32, 48]},
        (80, 100),
        ScaledStored,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
        (16, 64),
        ScaledStored,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        (24, 64),
        Float4Stored,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        (24, 64),
        Float4Stored,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_module_is_read_to_the_bit(case: str, dtype: torch.dtype) -> None:
    form, weights, shape, kind = CASES[case]
    config, written, expected = write(form, weights, shape, dtype)
    tensors = Tensors(module(NAME, written))
    stored = CompressedTensors.read(config).matrix(NAME, shape, tensors, False)
    assert isinstance(stored, kind)
    tensors.finish()
    assert torch.equal(stored.dense(WeightFormat(expected.dtype, CPU)), expected)
    if isinstance(stored, GroupedStored):
        codes = stored.codes_NK[:, : stored.group].int()
        assert codes.min() >= -(1 << (stored.bits - 1))
        assert codes.max() < 1 << (stored.bits - 1)


@pytest.mark.parametrize(("activations", "rounds"), [("int", True), ("float", False), (None, False)])
def test_integers_made_for_integer_activations_are_known_as_such(activations: str | None, rounds: bool) -> None:
    """Through everything that is done with a matrix before it is packed."""
    config, written, expected = write("int-quantized", {"num_bits": 8, "strategy": "channel"}, (32, 64), torch.float32)
    given = {"type": activations, "num_bits": 8, "strategy": "token", "dynamic": True}
    config["config_groups"]["group_0"]["input_activations"] = given if activations else None
    stored = CompressedTensors.read(config).matrix(NAME, (32, 64), Tensors(module(NAME, written)), False)
    assert isinstance(stored, GroupedStored)
    parts = [stored.shard(dim, rank, 2) for dim in range(2) for rank in range(2)]
    parts += [stored.rows(np.arange(32)[::-1].copy()), stored.join([stored])]
    assert [part.rounds_activations for part in (stored, *parts)] == [rounds] * 7
    halves = torch.cat([part.dense(WeightFormat(torch.float32, CPU)) for part in parts[2:4]], dim=1)
    assert torch.equal(halves, expected)


@pytest.mark.parametrize(
    ("form", "weights", "plain"),
    [
        (
            "float-quantized",
            {**FP8, "strategy": "block", "block_structure": "128x64"},
            {**FP8, "strategy": "block", "block_structure": [128, 64]},
        ),
        ("pack-quantized", {**INT4, "type": "INT", "strategy": "GROUP"}, INT4),
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "Float", "strategy": "Tensor_Group", "group_size": 16}, None),
    ],
)
def test_spellings_of_the_library(form: str, weights: dict[str, Any], plain: dict[str, Any] | None) -> None:
    """What it writes after reading a spelling means the same."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations={"type": "FLOAT"})
    groups: list[dict[str, Any]] = [
        {"targets": ["Linear"], "weights": weights, "input_activations": {"type": "FLOAT", "num_bits": 8}},
        scheme.model_dump(mode="json"),
    ]
    if plain is not None:
        groups.append({**groups[0], "weights": plain})
    first, *others = (CompressedTensors.read({"format": form, "config_groups": {"group_0": group}}) for group in groups)
    assert others == [first] * (len(groups) - 1)


@pytest.mark.parametrize("name", PRESET_SCHEMES)
@pytest.mark.parametrize("form", [None, "mixed-precision", "pack-quantized"])
def test_presets_are_the_librarys(name: str, form: str | None) -> None:
    """The library writes the group that a preset stands for, and chooses the format where none is given."""
    scheme = preset_name_to_scheme(name, ["re:.*_proj"])
    inferred = infer_module_format(torch.nn.Linear, scheme).value
    group = {**scheme.model_dump(mode="json"), "format": form if form == "pack-quantized" else inferred}
    other = {"targets": ["lm_head"], "weights": INT4, "format": "pack-quantized"}

    def read(groups: dict[str, Any]) -> Plain:
        return CompressedTensors.read({"format": form, "config_groups": {"group_0": other, **groups}})

    try:
        expected = read({"group_1": group})
    except CheckpointError:
        with pytest.raises(CheckpointError, match=rf"config_groups\.{name}[. ]"):
            read({name: ["re:.*_proj"]})
        assert form == "pack-quantized" or name.startswith("MXFP6")
        return
    for spelled in (name, name.lower()):
        assert read({spelled: ["re:.*_proj"]}) == expected
