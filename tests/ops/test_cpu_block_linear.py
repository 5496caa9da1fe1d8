"""``block_linear``: packing is exact, the kernel keeps its stated bound, and a row never sees its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops import dispatch
from octavo.ops.linear.block_linear import KINDS, PackedBlocks, block_linear
from octavo.ops.linear.linear import Fused
from octavo.weights.gguf.block_formats import BlockTensor, Groups, dequantize, split_groups
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import EVERY_KIND, needs_float_kernels, poison_new_tensors, random_blocks, random_ordered
from tests.tiers import one_in

SHAPES = [(64, 512), (37, 768), (5, 256), (16, 1536)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("shape", [(64, 512), (37, 768), (1, 256), (2051, 256)])
def test_packing_is_exact(kind: str, shape: tuple[int, int]) -> None:
    blocks = random_blocks(kind, *shape)
    packed = PackedBlocks.pack(blocks)
    assert torch.equal(packed.unpack(), torch.from_numpy(dequantize(blocks)))
    assert packed.shape == shape


def test_scales_that_float16_cannot_hold_stay_float32() -> None:
    assert PackedBlocks.pack(random_blocks("Q4_1", 16, 256)).scales.dtype == torch.float16
    assert PackedBlocks.pack(random_blocks("Q4_K", 16, 256)).has_multiples


def test_packed_blocks_take_no_more_room_than_the_file() -> None:
    for kind in sorted(kind for kind in KINDS if kind[:2] in ("Q4", "Q5", "Q6", "Q8")):  # others get wider numbers
        blocks = random_blocks(kind, 64, 512)
        more = 1.03 if kind in ("Q4_K", "Q5_K") else 1  # multiples of 6 bits take a byte each
        assert blocks.data.nbytes <= PackedBlocks.pack(blocks).num_bytes <= more * blocks.data.nbytes


def test_scales_that_are_no_multiples_stay_floats() -> None:
    blocks = random_blocks("Q6_K", 40, 512)
    groups = split_groups(blocks)
    assert groups.factors is not None
    packed = PackedBlocks.of_groups("Q6_K", (40, 512), 6, [groups._replace(factors=groups.factors * np.float16(3))])
    assert not packed.has_multiples
    assert torch.equal(packed.unpack(), torch.from_numpy(dequantize(blocks)))


@one_in(3)
@needs_float_kernels
@pytest.mark.parametrize("rows", [1, 2, 4, 16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (5, 32), (6, 16), (8, 32)])
def test_the_largest_numbers_overflow_nothing(bits: int, group: int, sign: float, rows: int) -> None:
    """All numbers are the largest of their bits, and all activations become 127 or -127."""
    numbers = np.full((32, 256), (1 << bits) - 1, np.uint8)
    ones = np.ones((32, 256 // group), np.float32)
    packed = PackedBlocks.of_groups("test", (32, 256), bits, [Groups(numbers, 0, ones, None)])
    result = block_linear(torch.full((rows, 256), sign), packed)
    torch.testing.assert_close(result, torch.full((rows, 32), sign * 256 * ((1 << bits) - 1)), rtol=1e-6, atol=0)


def test_floats_cannot_be_packed() -> None:
    blocks = random_blocks("Q8_0", 1, 32)
    with pytest.raises(ValueError, match="F32"):
        PackedBlocks.pack(type(blocks)("F32", (1, 32), np.zeros((1, 128), np.uint8)))


def test_the_reference_is_the_matrix_product() -> None:
    packed, x = PackedBlocks.pack(random_blocks("Q5_K", 19, 512)), torch.randn(3, 512)
    with dispatch.only("reference"):
        found, exact = block_linear(x, packed).double(), x.double() @ packed.unpack().double().T
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)


@needs_float_kernels
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("shape", SHAPES)
def test_error_is_within_the_stated_bound(kind: str, shape: tuple[int, int]) -> None:
    packed = PackedBlocks.pack(random_blocks(kind, *shape))
    x = torch.randn(11, shape[1]) * torch.logspace(-6, 6, 11)[:, None]
    weight = packed.unpack().double()
    found = block_linear(x, packed)
    groups = weight.abs().view(shape[0], -1, packed.x_group).sum(-1)
    largest = x.double().abs().view(11, -1, packed.x_group).amax(-1)
    bound = largest / 254 @ groups.T + 1e-5 * (x.double().abs() @ weight.abs().T)
    error = (found.double() - x.double() @ weight.T).abs()
    assert bool((error <= bound).all())
    assert error.max() > 0, "activations are rounded, so something must differ"


@needs_float_kernels
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_row_does_not_depend_on_other_rows_or_on_threads(kind: str) -> None:
    packed, x = PackedBlocks.pack(random_blocks(kind, 83, 512)), torch.randn(300, 512)
    alone = torch.cat([block_linear(row, packed) for row in x[:, None]])
    try:
        for count in (1, 2, 3, 12):  # with 12, rows are divided too
            threads.set_num_threads(count)
            for num_rows in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 23, 64, 256, 257, 258, 259, 300):
                start = (300 - num_rows) // 2
                assert torch.equal(block_linear(x[start : start + num_rows], packed), alone[start : start + num_rows])
    finally:
        threads.set_num_threads(1)


@needs_float_kernels
def test_a_row_that_is_not_finite_spoils_itself_alone() -> None:
    packed, x = PackedBlocks.pack(random_blocks("Q4_1", 33, 256)), torch.randn(27, 256)
    expected = block_linear(x, packed)
    x[2, 7], x[5, 200] = float("nan"), float("inf")
    found = block_linear(x, packed)
    others = [row for row in range(27) if row not in (2, 5)]
    assert torch.equal(found[others], expected[others])
    assert not found[[2, 5]].isfinite().any()


@needs_float_kernels
def test_tiny_and_zero_rows() -> None:
    packed = PackedBlocks.pack(random_blocks("Q8_0", 20, 64))
    x = torch.zeros(3, 64)
    x[1] = 1e-38
    x[2] = 1e-25
    found = block_linear(x, packed)
    assert bool((found[:2] == 0).all())
    assert found[2].abs().max() > 0
    assert block_linear(torch.zeros(0, 64), packed).shape == (0, 20)


@needs_float_kernels
@pytest.mark.parametrize("number", [0, 255])
def test_the_largest_sums_are_exact(number: int) -> None:
    values, scales = torch.full((1, 3, 8, 16, 4), number, dtype=torch.uint8), torch.ones(1, 3, 1, 16)
    packed = PackedBlocks("Q8_0", (16, 96), 8, 128, values, scales)
    for sign in (-1.0, 1.0):
        expected = torch.full((13, 16), sign * 96 * 127 * (number - 128))
        assert torch.equal(block_linear(torch.full((13, 96), sign * 127), packed), expected)


@needs_float_kernels
@pytest.mark.parametrize("rows", [1, 13])
def test_the_largest_numbers_times_multiples_fit_bytes(rows: int) -> None:
    data = np.zeros((16, 110), np.uint8)  # the least number is -4, and the least multiple -32
    data[:, 108:] = np.ones((16, 1), np.float16).view(np.uint8)
    packed = PackedBlocks.pack(BlockTensor("Q3_K", (16, 256), data))
    assert packed.joins_groups
    for sign in (-1.0, 1.0):
        x = torch.full((rows, 256), sign * 127)
        assert torch.equal(block_linear(x, packed), torch.full((rows, 16), sign * 256 * 127 * 128))


@needs_float_kernels
def test_a_row_whose_numbers_are_too_large_spoils_itself_alone() -> None:
    packed, x = PackedBlocks.pack(random_blocks("Q4_1", 33, 256)), torch.randn(27, 256)
    expected = block_linear(x, packed)
    x[4] *= 1e34  # still finite times a scale
    x[7] *= 1e36
    found = block_linear(x, packed)
    others = [row for row in range(27) if row not in (4, 7)]
    assert torch.equal(found[others], expected[others])
    assert not found[[4, 7]].isfinite().any()


@needs_float_kernels
def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="64"):
        block_linear(torch.zeros(1, 64), PackedBlocks.pack(random_blocks("Q8_0", 4, 32)))


def test_other_dtypes_are_declined_with_a_reason() -> None:
    reasons = [choice.reason for choice in block_linear.choices("cpu", torch.bfloat16) if choice.kernel == "numba"]
    assert reasons == ["activations must be float32, got torch.bfloat16"]


def rows_with_large_channels(num_rows: int, columns: int, seed: int = 3) -> Tensor:
    """Each row has two channels, of its own choice, that are far larger than the others."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, columns, generator=rng)
    places = torch.randint(columns, (num_rows, 2), generator=rng)
    return x.scatter(1, places, 40 + 20 * torch.rand(num_rows, 2, generator=rng))


@needs_float_kernels
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_large_channels_cost_the_others_no_precision(kind: str) -> None:
    packed, x = PackedBlocks.pack(random_blocks(kind, 37, 768)), rows_with_large_channels(9, 768)
    weight = packed.unpack().double()
    groups = x.view(9, -1, packed.x_group)
    groups *= groups.amax(-1, keepdim=True) > 20
    largest_of_others = groups.double().where(groups < 20, 0.0).abs().amax(-1)
    bound = largest_of_others / 254 @ weight.abs().view(37, -1, packed.x_group).sum(-1).T
    bound += 1e-6 * (x.double().abs() @ weight.abs().T)
    error = (block_linear(x, packed).double() - x.double() @ weight.T).abs()
    assert bool((error <= bound).all())


@needs_float_kernels
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_more_large_numbers_than_there_is_room_for(kind: str) -> None:
    packed, x = PackedBlocks.pack(random_blocks(kind, 37, 1024)), torch.randn(13, 1024)
    groups = x.view(13, -1, packed.x_group)
    groups[:, ::2] *= 0.01
    groups[:, 1::2] = groups[:, 1::2].sign() * 5
    weight = packed.unpack().double()
    bound = groups.double().abs().amax(-1) / 254 @ weight.abs().view(37, -1, packed.x_group).sum(-1).T
    bound += 1e-6 * (x.double().abs() @ weight.abs().T)
    found = block_linear(x, packed)
    assert bool(((found.double() - x.double() @ weight.T).abs() <= bound).all())
    assert torch.equal(found, torch.cat([block_linear(row, packed) for row in x[:, None]]))


@needs_float_kernels
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q8_0"])
def test_a_row_does_not_depend_on_other_rows_large_channels(kind: str) -> None:
    packed, x = PackedBlocks.pack(random_blocks(kind, 83, 512)), rows_with_large_channels(33, 512)
    x[::5] = torch.randn(7, 512)
    alone = torch.cat([block_linear(row, packed) for row in x[:, None]])
    for num_rows in (2, 3, 4, 7, 12, 16, 31, 33):
        assert torch.equal(block_linear(x[:num_rows], packed), alone[:num_rows])


@needs_float_kernels
def test_columns_in_another_order_multiply_their_inputs() -> None:
    packed, x, norm = random_ordered(37, 192), torch.randn(30, 192), torch.rand(192)
    assert packed.order is not None
    plain = replace(packed, order=None)
    matrix = torch.empty(37, 192).index_copy_(1, packed.order.long(), plain.unpack())
    assert torch.equal(packed.unpack(), matrix)
    assert torch.equal(block_linear(x, packed), block_linear(x[:, packed.order], plain))
    normed = block_linear(x, packed, Fused(norm_K=norm, eps=1e-6))
    assert torch.equal(block_linear(x[7:8], packed, Fused(norm_K=norm, eps=1e-6)), normed[7:8])
    exact = (x.double() * (x.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * norm) @ matrix.double().T
    assert (normed - exact).norm() < 0.01 * exact.norm()
