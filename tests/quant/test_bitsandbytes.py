"""bitsandbytes: tables of 4 bits within what rounding them to 8 moves, integers of 8 bits exactly."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.methods import read_method
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight
from tests.quant.test_methods import FORM, InMemory

NAME = "model.layers.0.self_attn.q_proj"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_storage": "uint8"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
NEGATIVE = -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0
POSITIVE = 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0
NF4 = torch.tensor([*NEGATIVE, *POSITIVE])
FP4 = torch.tensor([0.0, 0.0052083335, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25])
TABLES = {"nf4": NF4, "fp4": torch.cat((FP4, -FP4))}
NESTED = 256
OFFSET = 0.05


def written(
    table: str, shape: tuple[int, int], block: int, is_nested: bool
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The tensors of a module of random codes, the matrix, and the largest of each entry's block."""
    entries = shape[0] * shape[1]
    codes = torch.randint(16, (entries,))
    absmax = torch.rand(entries // block) + 0.5
    state: dict[str, Any] = {"quant_type": table, "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": TABLES[table],
        "weight.absmax": absmax,
    }
    if is_nested:
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": OFFSET}
        outer, inner = torch.rand(-(-len(absmax) // NESTED)) + 1, torch.linspace(-1, 1, 256)
        fields = torch.randint(128, 256, (len(absmax),))
        absmax = inner[fields] * outer.repeat_interleave(NESTED)[: len(absmax)] + OFFSET
        nested = {"absmax": fields.to(torch.uint8), "nested_absmax": outer, "nested_quant_map": inner}
        tensors |= {f"weight.{part}": tensor for part, tensor in nested.items()}
    text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    largest = absmax.repeat_interleave(block).view(shape)
    tensors[f"weight.quant_state.bitsandbytes__{table}"] = text
    return tensors, TABLES[table][codes].view(shape) * largest, largest


def read(config: dict[str, Any], parts: dict[str, Tensor], shape: tuple[int, int]) -> StoredWeight:
    source = InMemory()
    source.tensors = {f"{NAME}.{part}": tensor for part, tensor in parts.items()}
    tensors = Tensors(source)
    found = read_method(config).matrix(NAME, shape, tensors, False)
    tensors.finish()  # none is left over
    return found


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_tables_are_rounded_to_8_bits(table: str, is_nested: bool, block: int) -> None:
    shape = 300, 128
    parts, matrix, largest = written(table, shape, block, is_nested)
    stored = read(FOUR, parts, shape)
    assert isinstance(stored, GroupedStored)
    assert stored.group == block
    found = stored.dense(FORM)
    assert ((found - matrix).abs() <= 0.0036 * largest.abs()).all()
    assert not torch.equal(found, matrix)


def test_blocks_that_do_not_end_with_a_row_are_made_dense() -> None:
    parts, matrix, _ = written("nf4", (8, 96), 64, True)
    stored = read(FOUR, parts, (8, 96))
    assert isinstance(stored, DenseStored)
    assert torch.equal(stored.dense(FORM), matrix)


def test_integers_of_8_bits() -> None:
    codes, scb = torch.randint(-127, 128, (24, 64), dtype=torch.int8), torch.rand(24)
    parts = {"weight": codes, "SCB": scb, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    torch.testing.assert_close(read(EIGHT, parts, (24, 64)).dense(FORM), codes.float() * scb[:, None] / 127)


def test_other_modules_are_not_quantised() -> None:
    weight = torch.randn(24, 64)
    assert isinstance(read(FOUR, {"weight": weight}, (24, 64)), DenseStored)


def state(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(5, 1, dtype=torch.uint8)}, r"weight has shape \[5, 1\]; expected \[384, 1\]"),
        ({"weight.quant_map": torch.full((16,), 2.0)}, "numbers beyond 1"),
        ({"weight.quant_map": torch.full((16,), float("nan"))}, "infinite or not numbers"),
        ({"weight.absmax": torch.zeros(7, dtype=torch.uint8)}, "absmax has 7 blocks for 8 x 96 entries"),
        ({"weight.absmax": torch.zeros(0, dtype=torch.uint8)}, "absmax has shape .*one number for each block"),
        ({"weight.nested_absmax": torch.ones(9)}, "nested_absmax has shape"),
        ({"weight.quant_state.bitsandbytes__nf4": state("{")}, "is not JSON with nested_blocksize"),
        ({"weight.quant_state.bitsandbytes__nf4": state("[" * 4000)}, "is not JSON with nested_blocksize"),
        ({"weight.quant_state.bitsandbytes__nf4": state("[]")}, "is not JSON with nested_blocksize"),
        (
            {"weight.quant_state.bitsandbytes__nf4": state('{"nested_blocksize": 0, "nested_offset": 0}')},
            "nested_blocksize is 0; it must be from 1",
        ),
        (
            {"weight.quant_state.bitsandbytes__nf4": state('{"nested_blocksize": 256, "nested_offset": NaN}')},
            "nested_offset is nan; it must be a number",
        ),
        ({"weight.quant_state.bitsandbytes__nf4": None}, "has no quant_state of nf4 or fp4"),
    ],
)
def test_hostile_tensors(changes: dict[str, Tensor | None], message: str) -> None:
    parts, _, _ = written("nf4", (8, 96), 64, True)
    changed = {name: part for name, part in {**parts, **changes}.items() if part is not None}
    with pytest.raises(CheckpointError, match=message):
        read(FOUR, changed, (8, 96))


def test_other_storage_is_refused() -> None:
    with pytest.raises(CheckpointError, match="bnb_4bit_quant_storage is 'bfloat16'; it must be uint8"):
        read_method({**FOUR, "bnb_4bit_quant_storage": "bfloat16"})
