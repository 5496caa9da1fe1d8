"""Recorded calls: they do again what was done, on what is in memory by then, and notice what cannot be repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.linear.block_linear import PackedBlocks
from octavo.ops.linear.linear import Fused
from octavo_kernels.cpu.calls import Arena, recording
from tests.ops.cpu_cases import needs_float_kernels, random_blocks

pytestmark = needs_float_kernels


def test_a_recording_is_repeated_on_what_its_inputs_hold_by_then() -> None:
    weights = [torch.randn(32, 32) for _ in range(5)]
    packed, norm = PackedBlocks.pack(random_blocks("Q4_1", 64, 32)), torch.randn(32)
    x = torch.randn(3, 32)

    def compute(x: Tensor) -> Tensor:
        for weight in weights:
            h = ops.linear(x, weight, Fused(norm_K=norm, eps=1e-5))
            x = ops.linear(
                ops.block_linear(h, packed, Fused(activation="silu")), weight, Fused(residual_TN=x.view(3, 32))
            )
        return x

    own = torch.zeros(3, 32)
    with torch.inference_mode(), recording(Arena()) as made:
        result = compute(ops.rms_norm(own, norm, 1e-5))
    assert not made.foreign
    for _ in range(3):
        x = torch.randn(3, 32)
        expected = compute(ops.rms_norm(x, norm, 1e-5))
        own.copy_(x)
        made.repeat()
        assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("operation", "name"),
    [(lambda x: x + 1, "add"), (lambda x: x.float().mul_(2), "mul"), (lambda x: x[[0]], "index"), (torch.sum, "sum")],
)
def test_other_operations_are_noticed(operation: Callable[[Tensor], Tensor], name: str) -> None:
    x = torch.randn(2, 16)
    with torch.inference_mode(), recording(Arena()) as made:
        operation(x)
    assert any(name in foreign for foreign in made.foreign)


@pytest.mark.parametrize("T", [1, 5])
def test_norms_of_some_columns_are_recorded(T: int) -> None:
    wide, weight, bias, residual = torch.randn(T, 200), torch.randn(64), torch.randn(64), torch.randn(T, 64)
    part = wide[:, 48:112]
    with torch.inference_mode(), recording(Arena()) as made:
        found = ops.rms_norm(part, weight, 1e-5, residual), ops.layer_norm(part, weight, bias, 1e-5)
    assert not made.foreign
    alone = part.clone()
    assert torch.equal(found[0], ops.rms_norm(alone, weight, 1e-5, residual))
    assert torch.equal(found[1], ops.layer_norm(alone, weight, bias, 1e-5))


def test_views_are_not_operations() -> None:
    x = torch.randn(4, 16)
    with torch.inference_mode(), recording(Arena()) as made:
        parts = x.view(4, 2, 8).split_with_sizes([1, 1], dim=1)
        assert torch.equal(parts[1].flatten(1)[1:].contiguous().to(torch.float32)[0], x[1, 8:])
    assert made.foreign <= {"aten.clone.default", "aten.equal.default"}


def test_a_failing_call_says_what_it_said_at_first() -> None:
    ids, table = torch.tensor([1]), torch.randn(4, 16)
    with recording(Arena()) as made:
        out = ops.embedding(ids, table)
    ids[0] = 3
    made.repeat()
    assert torch.equal(out[0], table[3])
    ids[0] = 4
    with pytest.raises(IndexError, match="from 0 to 3"):
        made.repeat()


def test_memory_that_nothing_refers_to_is_lent_again() -> None:
    arena = Arena()
    first = arena.empty((3, 5), torch.float32)
    part, address = first[1:], first.data_ptr()
    del first
    assert arena.empty((16,), torch.float32).data_ptr() != address
    del part
    assert arena.empty((16,), torch.float32).data_ptr() == address
    assert arena.empty((0, 4), torch.float32).shape == (0, 4)
