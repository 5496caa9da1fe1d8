"""Rotary angles, linear maps out of parts, and embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.rotary import DefaultRope, LinearRope, Llama3Rope, Rotary
from octavo.ops.linear.block_linear import PackedBlocks
from octavo.quant.stored.block_weight import BlockWeight, GgufStored
from octavo.quant.stored.stored_weight import DenseStored, DenseWeight, WeightFormat, make_weights
from octavo.weights.gguf.block_formats import BlockTensor, dequantize
from tests.ops.cpu_cases import needs_float_kernels

CPU = torch.device("cpu")


def q8_blocks(rows: int, columns: int, seed: int) -> BlockTensor:
    rng = np.random.default_rng(seed)
    scales = rng.random((rows, columns // 32, 1), dtype=np.float32).astype(np.float16).view(np.uint8)
    numbers = rng.integers(0, 256, (rows, columns // 32, 32), dtype=np.uint8)
    return BlockTensor("Q8_0", (rows, columns), np.concatenate([scales, numbers], axis=2).reshape(rows, -1))


def dense(*parts: Tensor) -> DenseStored:
    return DenseStored(parts)


def blocks(*parts: BlockTensor) -> GgufStored:
    return GgufStored(parts)


def form(packs: bool = False) -> WeightFormat:
    return WeightFormat(torch.float32, CPU, packs)


def test_rotary_angles_grow_with_position_and_shrink_with_the_pair() -> None:
    cos, sin = Rotary(DefaultRope(100.0), 4, CPU)(torch.tensor([0, 3]))
    angles = torch.tensor([[0.0, 0.0], [3.0, 0.3]])
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = DefaultRope(100.0).frequencies(8), LinearRope(100.0, 4.0).frequencies(8)
    torch.testing.assert_close(scaled, plain / 4)


def test_llama3_scaling_slows_only_slow_pairs() -> None:
    rope = Llama3Rope(10000.0, 8.0, 1.0, 4.0, original_max_len=64)
    plain, scaled = DefaultRope(10000.0).frequencies(16), rope.frequencies(16)
    turns = 64 * plain / (2 * torch.pi)
    ratio = scaled / plain
    assert torch.equal(ratio[turns > 4], torch.ones(int((turns > 4).sum())))
    torch.testing.assert_close(ratio[turns < 1], torch.full((int((turns < 1).sum()),), 1 / 8))
    between = ratio[(turns > 1) & (turns < 4)]
    assert len(between) > 0
    assert ((between > 1 / 8) & (between < 1)).all()


@needs_float_kernels
def test_parts_side_by_side_in_every_mix_of_kinds() -> None:
    parts = [
        dense(torch.randn(3, 32)),
        blocks(q8_blocks(4, 32, 0)),
        blocks(q8_blocks(1, 32, 1)),
        dense(torch.randn(2, 32)),
    ]
    bias, x = torch.randn(10), torch.randn(5, 32)
    expected = x @ torch.cat([part.dense(form()) for part in parts]).T + bias
    for packs, num_weights, tolerance in ((False, 1, 1e-3), (True, 3, 30.0)):
        weights = make_weights(parts, form(packs))
        assert len(weights) == num_weights
        torch.testing.assert_close(Linear(weights, bias)(x), expected, rtol=1e-2 if packs else 1e-4, atol=tolerance)


@needs_float_kernels
def test_neighbouring_blocks_are_one_weight() -> None:
    first, second = q8_blocks(4, 64, 0), q8_blocks(2, 64, 1)
    (weight,) = make_weights([blocks(first), blocks(second)], form(packs=True))
    assert weight.dense_NK is None
    matrix = np.concatenate([dequantize(first), dequantize(second)])
    assert torch.equal(weight.rows(torch.arange(6)), torch.from_numpy(matrix))


def test_kinds_without_a_kernel_are_made_dense() -> None:
    tensor = torch.randn(3, 32).half()
    (weight,) = make_weights([blocks(BlockTensor("F16", (3, 32), tensor.numpy().view(np.uint8)))], form(packs=True))
    assert weight.dense_NK is not None
    assert torch.equal(weight.dense_NK, tensor.float())


def test_one_dense_part_is_not_copied() -> None:
    part = torch.randn(3, 4)
    (weight,) = make_weights([dense(part)], form())
    assert weight.dense_NK is part


def test_embedding_rows_of_blocks_and_of_a_tensor_are_equal() -> None:
    table = q8_blocks(50, 64, 3)
    weights = BlockWeight(PackedBlocks.pack(table)), DenseWeight(torch.from_numpy(dequantize(table)))
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(Embedding(weights[0])(ids), Embedding(weights[1])(ids))
    assert torch.equal(Embedding(weights[1])(ids), torch.from_numpy(dequantize(table))[ids])


@pytest.mark.parametrize("bad", [-1, 50])
def test_ids_beyond_the_vocabulary_do_not_wrap(bad: int) -> None:
    table = q8_blocks(50, 32, 3)
    for weight in (BlockWeight(PackedBlocks.pack(table)), DenseWeight(torch.from_numpy(dequantize(table)))):
        with pytest.raises(IndexError):
            Embedding(weight)(torch.tensor([1, bad]))
