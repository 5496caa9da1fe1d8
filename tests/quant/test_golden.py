"""Linear maps packed by AutoGPTQ, GPTQModel and AutoAWQ (``golden/make.py``), read to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.methods import read_method
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.stored_weight import WeightFormat
from tests.quant.sources import module

PATH = Path(__file__).parent / "golden" / "linears.safetensors"
with safe_open(PATH, framework="pt") as file:
    CONFIGS = file.metadata()


@pytest.mark.parametrize("case", sorted(CONFIGS))
def test_a_linear_map_is_read_to_the_bit(case: str) -> None:
    config = json.loads(CONFIGS[case])
    with safe_open(PATH, framework="pt") as file:
        names = [name for name in file.offset_keys() if name.startswith(f"{case}/")]
        parts = {name.partition("/")[2]: file.get_tensor(name) for name in names}
    matrix, name = parts.pop("matrix"), "model.layers.0.mlp.down_proj"
    tensors = Tensors(module(name, parts))
    stored = read_method(config).matrix(name, tuple(matrix.shape), tensors, False)
    tensors.finish()
    assert isinstance(stored, GroupedStored)
    assert stored.bits == config["bits"]
    assert (stored.order_K is not None) == bool(config.get("desc_act"))
    assert torch.equal(stored.dense(WeightFormat(torch.float16, torch.device("cpu"))), matrix)
