"""Every form of stored weight keeps its values whatever is done to it before it is packed or made dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops import dispatch
from octavo.ops.linear.block_linear import KINDS
from octavo.ops.linear.linear import Fused
from octavo.quant.stored.block_weight import BlockWeight, GgufStored
from octavo.quant.stored.float4 import E2M1, Float4Stored
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import (
    DenseStored,
    DenseWeight,
    StoredWeight,
    WeightFormat,
    fill,
    filled,
    make_weights,
)
from tests.ops.cpu_cases import needs_float_kernels, random_blocks
from tests.tiers import one_in

CPU = torch.device("cpu")
FORM = WeightFormat(torch.float32, CPU)
N, K = 12, 1024
Make = Callable[[int, int, int], StoredWeight]


def codes(bits: int, rows: int, columns: int, generator: torch.Generator) -> Tensor:
    largest = 1 << (bits - 1)
    return torch.randint(-largest, largest, (rows, columns), generator=generator).to(torch.int8)


def grouped(bits: int, group: int, has_zeros: bool = False, is_ordered: bool = False) -> Make:
    def make(rows: int, columns: int, seed: int) -> GroupedStored:
        generator, G = torch.Generator().manual_seed(seed), columns // group
        scales = torch.rand(rows, G, generator=generator).half().float()
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(0)) if is_ordered else None
        zeros = codes(bits, rows, G, generator) if has_zeros else None
        return GroupedStored(codes(bits, rows, columns, generator), scales, zeros, bits, order)

    return make


def scaled(*block: int) -> Make:
    def make(rows: int, columns: int, seed: int) -> ScaledStored:
        generator = torch.Generator().manual_seed(seed)
        height, width = block[0] or rows, block[1] or columns
        values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // height), -(-columns // width), generator=generator)
        return ScaledStored(values, scales, (height, width))

    return make


def mxfp4(rows: int, columns: int, seed: int) -> Float4Stored:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    return Float4Stored(codes, torch.randint(120, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator))


def nvfp4(divides: bool) -> Make:
    def make(rows: int, columns: int, seed: int) -> Float4Stored:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
        scales = torch.rand(rows, columns // 16, generator=generator).to(torch.float8_e4m3fn)
        return Float4Stored(codes, scales, torch.full((rows,), 0.3 + seed), divides)

    return make


def numbers(rows: int, columns: int, seed: int) -> DenseStored:
    return DenseStored((torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16(),))


def in_blocks(kind: str) -> Callable[[int, int, int], GgufStored]:
    return lambda rows, columns, seed: GgufStored((random_blocks(kind, rows, columns, seed),))


FORMS: dict[str, Make] = {
    "dense": numbers,
    "int4, groups of 128": grouped(4, 128),
    "int4, groups of 32, zeros": grouped(4, 32, has_zeros=True),
    "int8, a scale for each output": grouped(8, K),
    "int4, in activation order": grouped(4, 128, has_zeros=True, is_ordered=True),
    "fp8, one scale": scaled(0, 0),
    "fp8, a scale for each output": scaled(1, 0),
    "fp8, blocks": scaled(4, 128),
    "fp8, blocks that do not divide the rows": scaled(5, 48),
    "mxfp4": mxfp4,
    "nvfp4, divided": nvfp4(True),
    "nvfp4, multiplied": nvfp4(False),
    **{kind: in_blocks(kind) for kind in sorted(KINDS)},
}


@pytest.fixture(params=FORMS)
def make(request: pytest.FixtureRequest) -> Callable[[int, int, int], StoredWeight]:
    return FORMS[request.param]


def test_rows_join_and_fill_move_rows_to_the_bit(make: Callable[[int, int, int], StoredWeight]) -> None:
    parts = [make(N, K, seed) for seed in range(3)]
    matrices = [part.dense(FORM) for part in parts]
    joined = parts[0].join(parts[1:])
    assert joined.shape == (3 * N, K)
    assert len({part.layout for part in (joined, *parts)}) == 1
    assert torch.equal(joined.dense(FORM), torch.cat(matrices))
    order = np.random.default_rng(0).permutation(3 * N)[:20]
    assert torch.equal(joined.rows(order).dense(FORM), torch.cat(matrices)[order])
    out = torch.zeros(N, K, dtype=torch.float64)
    fill(out, [parts[1]])
    assert torch.equal(out.float(), matrices[1])
    assert torch.equal(filled([parts[0], numbers(2, K, 9)], FORM)[:N], matrices[0])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_are_parts_of_the_matrix(make: Callable[[int, int, int], StoredWeight], size: int) -> None:
    weight = make(N, K, 0).join([make(N, K, 1)])
    matrix = weight.dense(FORM)
    for dim in (0, 1):
        shards = [weight.shard(dim, rank, size) for rank in range(size)]
        assert torch.equal(torch.cat([shard.dense(FORM) for shard in shards], dim=dim), matrix)
        assert [shard.shape for shard in shards] == [(2 * N // (1, size)[dim == 0], K // (1, size)[dim == 1])] * size
        assert all(shard.dense(FORM).is_contiguous() for shard in shards)
    assert torch.equal(weight.shard(0, 0, 2).join([weight.shard(0, 1, 2)]).dense(FORM), matrix)


PACKED = [*sorted(KINDS), *(name for name in FORMS if name.startswith(("int", "mxfp4", "nvfp4")))]


@needs_float_kernels
@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_exact(kind: str) -> None:
    weight = FORMS[kind](37, K, 0)
    packed = weight.pack(WeightFormat(torch.float32, CPU, packs=True))
    assert isinstance(packed, BlockWeight)
    assert torch.equal(packed.packed.unpack(), weight.dense(FORM))
    assert torch.equal(packed.rows(torch.tensor([36, 0])), weight.dense(FORM)[[36, 0]])


@needs_float_kernels
@one_in(7)
@pytest.mark.parametrize("kind", [kind for kind in PACKED if "order" in kind or kind in KINDS or "groups" in kind])
def test_a_row_of_a_product_does_not_depend_on_the_others(kind: str) -> None:
    weight, x_TK, norm_K = FORMS[kind](48, K, 0), torch.randn(20, K), torch.rand(K)
    packed = weight.pack(WeightFormat(torch.float32, CPU, packs=True))
    assert packed is not None
    together = packed.apply(x_TK, Fused(norm_K=norm_K, eps=1e-6))
    for t in (0, 7, 19):
        assert torch.equal(packed.apply(x_TK[t : t + 1], Fused(norm_K=norm_K, eps=1e-6)), together[t : t + 1])
    normed_TK = x_TK.double() * (x_TK.double().square().mean(1, keepdim=True) + 1e-6).rsqrt() * norm_K
    exact = normed_TK @ weight.dense(FORM).double().T
    assert (together - exact).norm() < 0.01 * exact.norm()


@one_in(3)
@needs_float_kernels
@pytest.mark.parametrize("kind", [kind for kind in PACKED if "order" not in kind])
def test_products_of_packed_shards_add_up(kind: str) -> None:
    weight, x = FORMS[kind](32, K, 0), torch.randn(5, K)
    packing = WeightFormat(torch.float32, CPU, packs=True)

    def product(part: StoredWeight, x_TK: torch.Tensor) -> torch.Tensor:
        (packed,) = make_weights([part], packing)
        assert packed.dense_NK is None
        return packed.apply(x_TK)

    expected = product(weight, x)
    by_rows = [product(weight.shard(0, rank, 2), x) for rank in range(2)]
    assert torch.equal(torch.cat(by_rows, dim=1), expected)
    by_columns = [product(weight.shard(1, rank, 2), half) for rank, half in enumerate(x.chunk(2, dim=1))]
    assert (sum(by_columns) - expected).norm() < 0.02 * expected.norm()


def test_what_cannot_be_divided_says_so(make: Callable[[int, int, int], StoredWeight]) -> None:
    with pytest.raises(CheckpointError, match="12 rows cannot be divided among 5 devices"):
        make(N, K, 0).shard(0, 0, 5)
    with pytest.raises(CheckpointError, match="1024 columns cannot be divided among 3 devices"):
        make(N, K, 0).shard(1, 0, 3)


@needs_float_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_sixteen_bits_beside_packed_weights(dtype: torch.dtype) -> None:
    matrix_NK, x_TK = torch.randn(70, 96).to(dtype), torch.randn(20, 96)
    weight = DenseStored((matrix_NK[:30], matrix_NK[30:])).pack(WeightFormat(torch.float32, CPU, packs=True))
    assert weight is not None
    assert weight.num_bytes == matrix_NK.nbytes
    assert torch.equal(weight.dense_NK, matrix_NK.float())
    wide, ids = DenseWeight(matrix_NK.float()), torch.tensor([69, 0, 31])
    assert torch.equal(weight.apply(x_TK), wide.apply(x_TK))
    assert torch.equal(weight.apply(x_TK[:1]), wide.apply(x_TK)[:1])
    assert torch.equal(weight.rows(ids), matrix_NK.float()[ids])
    with dispatch.only("reference"):
        torch.testing.assert_close(weight.apply(x_TK), wide.apply(x_TK))
        assert torch.equal(weight.rows(ids), matrix_NK.float()[ids])
    for form in (WeightFormat(torch.float32, CPU), WeightFormat(torch.float32, torch.device("cuda"), packs=True)):
        assert DenseStored((matrix_NK,)).pack(form) is None
    assert DenseStored((matrix_NK[:, :90],)).pack(WeightFormat(torch.float32, CPU, packs=True)) is None
    with pytest.raises(IndexError, match="token ids must be from 0 to 69"):
        weight.rows(torch.tensor([70]))


@needs_float_kernels
def test_groups_that_no_kernel_takes_are_dequantised() -> None:
    packing = WeightFormat(torch.float32, CPU, packs=True)
    assert grouped(4, 24)(N, 96, 0).pack(packing) is None
    assert grouped(4, 128, is_ordered=True)(N, K, 0).shard(1, 0, 2).pack(packing) is None


@pytest.mark.parametrize(("kind", "unit"), [("Q4_K", 256), ("Q8_0", 32)])
def test_blocks_are_not_cut(kind: str, unit: int) -> None:
    columns = unit * 3
    with pytest.raises(CheckpointError, match=rf"{columns} columns .* 2 devices in whole blocks of {unit}"):
        in_blocks(kind)(4, columns, 0).shard(1, 0, 2)
    with pytest.raises(CheckpointError, match="96 columns cannot be divided among 2 devices in whole blocks of 32"):
        mxfp4(4, 96, 0).shard(1, 0, 2)
    for weight in (in_blocks(kind)(4, columns, 0), mxfp4(4, 96, 0)):
        assert weight.column_block == weight.shape[1] // 3
        parts = [weight.shard(1, rank, 2, weight.column_block).dense(FORM) for rank in range(2)]
        assert [part.shape[1] // weight.column_block for part in parts] == [2, 1]
        assert torch.equal(torch.cat(parts, dim=1), weight.dense(FORM))


def test_columns_that_cut_groups_and_blocks_are_exact() -> None:
    for make in (grouped(4, 128), grouped(4, 128, has_zeros=True, is_ordered=True), scaled(4, 128)):
        weight = make(N, 384, 0)
        shards = [weight.shard(1, rank, 2) for rank in range(2)]
        assert torch.equal(torch.cat([shard.dense(FORM) for shard in shards], dim=1), weight.dense(FORM))


@pytest.mark.parametrize("has_one", [True, False])
def test_part_of_a_matrix_rounds_activations_as_the_whole_does(has_one: bool) -> None:
    """Also where a rank's part of rows of several groups has one."""
    columns = 64 if has_one else 32
    for whole in (scaled(16, columns)(16, 64, 0), grouped(8, columns)(16, 64, 0)):
        assert isinstance(whole, ScaledStored | GroupedStored)
        assert not whole.shard(1, 0, 2).rounds_activations
        for rank in range(2):
            part = replace(whole, rounds_activations=True).shard(1, rank, 2)
            assert part.shape == (16, 32)
            assert part.rounds_activations == has_one


def test_rows_of_whole_blocks_stay_in_blocks() -> None:
    weight = scaled(4, 128)(22, K, 0)
    for order, block in (
        (np.arange(8, 22), (4, 128)),
        (np.array([4, 5, 6, 7, 0, 1]), (4, 128)),
        (np.arange(2, 10), (1, 128)),
        (np.array([4, 5, 7, 6]), (1, 128)),
    ):
        rows = weight.rows(order)
        assert isinstance(rows, ScaledStored)
        assert rows.block == block
        assert torch.equal(rows.dense(FORM), weight.dense(FORM)[order])


def test_scales_of_joined_tensors() -> None:
    parts = [scaled(0, 0)(rows, K, rows) for rows in (4, 8)]
    joined = parts[0].join(parts[1:])
    assert isinstance(joined, ScaledStored)
    assert joined.block == (1, K)
    assert torch.equal(joined.dense(FORM), torch.cat([part.dense(FORM) for part in parts]))


def test_joined_groups_share_an_order() -> None:
    first, other = (grouped(4, 128, is_ordered=is_ordered)(N, K, 0) for is_ordered in (True, False))
    assert first.layout != other.layout
    assert len(make_weights([first, other], FORM)) == 1, "both are dense"


def test_integers_are_dequantised_one_by_one() -> None:
    weight = grouped(3, 16, has_zeros=True, is_ordered=True)(5, 64, 0)
    assert isinstance(weight, GroupedStored)
    expected = np.zeros((5, 64), np.float32)
    for n in range(5):
        for column in range(64):
            code, zero = weight.codes_NK[n, column].item(), weight.zeros_NG[n, column // 16].item()
            scale = np.float32(weight.scales_NG[n, column // 16].item())
            expected[n, weight.order_K[column]] = np.float32(code - zero) * scale
    assert np.array_equal(weight.dense(FORM).numpy(), expected)


@pytest.mark.parametrize("divides", [False, True])
def test_fp4_is_dequantised_one_by_one(divides: bool) -> None:
    weight = nvfp4(divides)(3, 32, 0)
    assert isinstance(weight, Float4Stored)
    for n in range(3):
        for k in range(32):
            code = weight.codes[n, k // 2].item() >> (4 if k % 2 else 0) & 15
            scale, tensor_scale = np.float32(weight.group_scales_NG[n, k // 16].item()), np.float32(0.3)
            whole = scale / tensor_scale if divides else scale * tensor_scale
            assert weight.dense(FORM)[n, k].item() == np.float32(E2M1[code]) * whole
