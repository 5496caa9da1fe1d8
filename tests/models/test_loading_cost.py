"""What loading a mixture costs: passes over its numbers, operations of the device, and imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.models.registry import load_model, read_config
from octavo.quant.stored import packed
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.dummy import DummyCheckpoint
from octavo_fleet.sim.shapes import SHAPES

EXPERTS = 32
SMALL = {"num_hidden_layers": 1, "vocab_size": 64, "num_local_experts": EXPERTS, "num_experts_per_tok": 4}
WIDTHS = {"hidden_size": 1024, "intermediate_size": 1024}
CONFIG = {**SHAPES["gpt-oss-20b-mxfp4"], **SMALL, **WIDTHS, "layer_types": ["full_attention"]}
MOST_PASSES = 50
"""Bytes read and written for a byte of packed weights, those that make random numbers included."""
MOST_OPERATIONS = 15
"""For an expert: of the device and with copies, but no views."""
OUTLINES = """
import sys
import torch
from octavo.models.config_checks import check_dummy
from octavo.models.registry import read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.dummy import DummyCheckpoint
from octavo_fleet.sim.shapes import SHAPES
from octavo_kernels.triton.backend import BACKEND

BACKEND.load_kernels()
families = {(config["model_type"], "quantization_config" in config): config for config in SHAPES.values()}
for config in families.values():
    known, dummy = read_config(config), DummyCheckpoint(config, {}, 0)
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        check_dummy(known, dummy, WeightFormat(dtype, torch.device(device), packs=True), 1, 1, 1 << 60)
    assert "torch._dynamo" not in sys.modules, config["model_type"]
print(len(families))
"""


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations, and the bytes of the tensors that they read and write."""

    count = num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_view = any(argument.alias_info is not None for argument in function._schema.returns)
        if not is_view or function._schema.name.endswith("_"):
            self.count += 1
            self.num_bytes += sum(x.nbytes for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        return result


def test_a_mixture_is_packed_in_few_passes_and_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "REFERENCE", "none")
    form = WeightFormat(torch.float32, torch.device("cpu"), packs=True)
    with Counted() as counted:  # type: ignore[no-untyped-call]
        loaded = load_model(read_config(CONFIG), DummyCheckpoint(CONFIG, {}, 0), form)
    assert counted.num_bytes < MOST_PASSES * loaded.bytes_by_format["e2m1"]
    assert counted.count < MOST_OPERATIONS * EXPERTS


def test_rows_at_equal_distances_are_no_copy() -> None:
    codes, scales = torch.randint(0, 256, (12, 32)).byte(), torch.randint(120, 130, (12, 2)).byte()
    stored = Float4Stored(codes, scales)
    dense = torch.empty(stored.shape)
    stored.fill(dense)
    for order in ([0, 2, 4, 6], [1, 4, 7, 10], [5], [3, 2, 1], [7, 0, 0, 2], [4, 5, 6, 7]):
        rows, found = stored.rows(np.array(order)), torch.empty(len(order), 64)
        rows.fill(found)
        assert torch.equal(found, dense[order])
        is_view = rows.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
        assert is_view == (order not in ([3, 2, 1], [7, 0, 0, 2]))


@pytest.mark.parametrize(
    "stored",
    [
        Float4Stored(torch.zeros(4, 32).byte(), torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(4)),
        GroupedStored(torch.zeros(4, 64).char(), torch.ones(4, 2), torch.zeros(4, 2).char(), 4, torch.arange(64)),
        ScaledStored(torch.zeros(4, 64).to(torch.float8_e4m3fn), torch.ones(1, 2), (4, 32)),
    ],
)
def test_experts_are_joined_where_they_are_placed(stored: Float4Stored | GroupedStored | ScaledStored) -> None:
    """With nothing left to copy there."""
    placed = stored.placed(torch.device("meta"))
    assert placed.layout == stored.layout
    joined = placed.join([placed])  # type: ignore[list-item]
    tensors = {name: part for name, part in vars(joined).items() if isinstance(part, Tensor) and name != "order_K"}
    assert all(part.is_meta for part in tensors.values())
    assert joined.shape == (8, 64)


def test_outlines_of_models_import_no_compiler_of_torch() -> None:
    """Which takes longer than everything else that a start finds out before it loads weights."""
    done = subprocess.run([sys.executable, "-c", OUTLINES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1000:]
    assert int(done.stdout) > 10
