"""Every form of stored weight keeps its values whatever is done to it before it is packed or made dense."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from octavo.errors import CheckpointError
from octavo.ops.block_linear import KINDS
from octavo.quant.blocks import BlockStored
from octavo.quant.mxfp4 import MXFP4Stored
from octavo.quant.stored import DenseStored, StoredWeight, WeightFormat, fill, filled, make_weights
from octavo.weights.mxfp4 import decode_mxfp4
from tests.ops.cpu_cases import needs_float_kernels, random_blocks

CPU = torch.device("cpu")
FORM = WeightFormat(torch.float32, CPU)
N, K = 12, 1024


def mxfp4(rows: int, columns: int, seed: int) -> MXFP4Stored:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return MXFP4Stored(blocks, torch.randint(120, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator))


def numbers(rows: int, columns: int, seed: int) -> DenseStored:
    return DenseStored((torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16(),))


def in_blocks(kind: str) -> Callable[[int, int, int], BlockStored]:
    return lambda rows, columns, seed: BlockStored((random_blocks(kind, rows, columns, seed),))


FORMS: dict[str, Callable[[int, int, int], StoredWeight]] = {
    "dense": numbers,
    "mxfp4": mxfp4,
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


@needs_float_kernels
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_products_of_packed_shards_add_up(kind: str) -> None:
    weight, x = in_blocks(kind)(32, K, 0), torch.randn(5, K)
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


@pytest.mark.parametrize(("kind", "unit"), [("Q4_K", 256), ("Q8_0", 32)])
def test_blocks_are_not_cut(kind: str, unit: int) -> None:
    columns = unit * 3
    with pytest.raises(CheckpointError, match=rf"{columns} columns .* 2 devices in whole blocks of {unit}"):
        in_blocks(kind)(4, columns, 0).shard(1, 0, 2)
    with pytest.raises(CheckpointError, match="96 columns cannot be divided among 2 devices in whole blocks of 32"):
        mxfp4(4, 96, 0).shard(1, 0, 2)


def test_mxfp4_is_made_dense_as_it_is_decoded() -> None:
    stored = mxfp4(N, K, 0)
    for dtype in (torch.float32, torch.bfloat16):
        form = WeightFormat(dtype, CPU, packs=True)
        assert stored.pack(form) is None
        assert torch.equal(stored.dense(form), decode_mxfp4(stored.blocks, stored.scales, dtype))
