"""Rotary angles, linear maps out of parts, and embeddings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.rotary import DefaultRope, LinearRope, Llama3Rope, Rotary
from octavo.ops.block_linear import PackedBlocks
from octavo.quant.scheme import BlockScheme, DenseWeight, WeightFormat, make_weights
from octavo.weights.blocks import BlockTensor, dequantize

CPU = torch.device("cpu")


def q8_blocks(rows: int, columns: int, seed: int) -> BlockTensor:
    rng = np.random.default_rng(seed)
    scales = rng.random((rows, columns // 32, 1), dtype=np.float32).astype(np.float16).view(np.uint8)
    numbers = rng.integers(0, 256, (rows, columns // 32, 32), dtype=np.uint8)
    return BlockTensor("Q8_0", (rows, columns), np.concatenate([scales, numbers], axis=2).reshape(rows, -1))


@dataclasses.dataclass
class Remembered:
    """A weight that stays in its blocks, as far as a test can tell."""

    blocks: BlockTensor

    @property
    def num_bytes(self) -> int:
        return self.blocks.data.nbytes

    def apply(self, x_TK: Tensor) -> Tensor:
        return x_TK @ torch.from_numpy(dequantize(self.blocks)).T


class KeepQ8:
    kinds = frozenset({"Q8_0"})

    def declines(self, device: str) -> str | None:
        return None

    def pack(self, blocks: BlockTensor) -> Remembered:
        return Remembered(blocks)


def form(scheme: BlockScheme | None = None) -> WeightFormat:
    return WeightFormat(torch.float32, CPU, scheme)


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


def test_parts_side_by_side_in_every_mix_of_kinds() -> None:
    dense = [torch.randn(3, 32), torch.randn(2, 32)]
    blocks = [q8_blocks(4, 32, 0), q8_blocks(1, 32, 1)]
    bias, x = torch.randn(10), torch.randn(5, 32)
    parts = [dense[0], blocks[0], blocks[1], dense[1]]
    matrix = torch.cat([part if isinstance(part, Tensor) else torch.from_numpy(dequantize(part)) for part in parts])
    expected = x @ matrix.T + bias
    for scheme, num_weights in ((None, 1), (KeepQ8(), 3)):
        weights = make_weights(parts, form(scheme))
        assert len(weights) == num_weights
        torch.testing.assert_close(Linear(weights, bias)(x), expected, rtol=1e-4, atol=1e-3)


def test_neighbouring_blocks_are_joined_byte_by_byte() -> None:
    parts = [q8_blocks(4, 64, 0), q8_blocks(2, 64, 1)]
    (weight,) = make_weights(parts, form(KeepQ8()))
    assert isinstance(weight, Remembered)
    assert weight.blocks.shape == (6, 64)
    assert np.array_equal(weight.blocks.data, np.concatenate([part.data for part in parts]))


def test_kinds_that_a_scheme_does_not_know_are_made_dense() -> None:
    tensor = torch.randn(3, 32).half()
    part = BlockTensor("F16", (3, 32), tensor.numpy().view(np.uint8))
    (weight,) = make_weights([part], form(KeepQ8()))
    assert isinstance(weight, DenseWeight)
    assert torch.equal(weight.weight_NK, tensor.float())


def test_one_dense_part_is_not_copied() -> None:
    part = torch.randn(3, 4)
    (weight,) = make_weights([part], form())
    assert isinstance(weight, DenseWeight)
    assert weight.weight_NK is part


def test_embedding_rows_of_blocks_and_of_a_tensor_are_equal() -> None:
    blocks = q8_blocks(50, 64, 3)
    table = torch.from_numpy(dequantize(blocks))
    ids = torch.tensor([49, 0, 7, 7])
    assert torch.equal(Embedding(PackedBlocks.pack(blocks))(ids), table[ids])
    assert torch.equal(Embedding(table)(ids), table[ids])


@pytest.mark.parametrize("bad", [-1, 50])
def test_ids_beyond_the_vocabulary_do_not_wrap(bad: int) -> None:
    blocks = q8_blocks(50, 32, 3)
    for table in (PackedBlocks.pack(blocks), torch.from_numpy(dequantize(blocks))):
        with pytest.raises(IndexError):
            Embedding(table)(torch.tensor([1, bad]))
