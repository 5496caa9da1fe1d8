"""AutoRound: the layouts that its version 0.16.1 writes, and modules that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.methods import read_method
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight
from tests.quant.test_methods import FORM, InMemory
from tests.quant.writers import Writer, awq, gptq

CONFIG = {
    "autoround_version": "0.16.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "enable_quanted_input": False,
    "group_size": 32,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
SHAPE = 16, 64
NAME = "model.layers.0.mlp.down_proj"


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = NAME) -> StoredWeight:
    source = InMemory(**{f"{name}.{part}": tensor for part, tensor in tensors.items()})
    return read_method(config).matrix(name, SHAPE, Tensors(source), False)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize(
    ("layout", "sym", "writer"),
    [
        ("auto_round:auto_gptq", True, gptq(4, 32)),
        ("auto_round:auto_gptq", False, gptq(4, 32, has_zeros=True)),
        ("auto_round:gptqmodel", False, gptq(4, 32, "gptq_v2", has_zeros=True)),
        ("auto_round:auto_awq", False, awq(32)),
    ],
)
def test_layouts(method: str, layout: str, sym: bool, writer: Writer) -> None:
    tensors, matrix = writer.write(torch.randn(SHAPE))
    config = {**CONFIG, "quant_method": method, "packing_format": layout, "sym": sym}
    assert torch.equal(read(config, tensors).dense(FORM), matrix)


def test_modules_that_differ() -> None:
    extra = {
        ".*(down|o)_proj.*": {"bits": 8},
        "model.layers.1.mlp.down_proj": {"bits": 2},
        "model.layers.0.mlp.up_proj": {"bits": 2, "group_size": 16},
        "model.layers.1.self_attn.q_proj": {"bits": 16},
    }
    config = {**CONFIG, "extra_config": extra}
    for name, writer in [
        (NAME, gptq(8, 32)),
        ("model.layers.1.mlp.down_proj", gptq(2, 32)),
        ("model.layers.0.mlp.up_proj", gptq(2, 16)),
        ("model.layers.0.mlp.up_proj_too", gptq(4, 32)),
        ("model.layers.0.mlp.gate_proj", gptq(4, 32)),
    ]:
        tensors, matrix = writer.write(torch.randn(SHAPE))
        assert torch.equal(read(config, tensors, name).dense(FORM), matrix), name
    plain = read(config, {"weight": torch.randn(SHAPE)}, "model.layers.1.self_attn.q_proj")
    assert isinstance(plain, DenseStored)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, "packing_format is 'auto_round:fp8_static'; it must be auto_"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'; it must be int"),
        ({"bits": 5}, "bits is 5; it must be 2 or 3 or 4 or 8"),
        ({"extra_config": {NAME: {"bits": 5}}}, r"extra_config\.model.*bits is 5; it must be 2 or 3 or 4 or 8 or 16"),
        ({"extra_config": {"(a+)+": {"bits": 8}}}, "extra_config: .* has repeated groups"),
        (
            {"packing_format": "auto_round:auto_awq", "extra_config": {NAME: {"bits": 8}}},
            "bits is 8; it must be 4 or 16, with the groups of all others, in this layout",
        ),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "bits is 8; it must be 4"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_method({**CONFIG, **changes})
