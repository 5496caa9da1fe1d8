"""Latent attention of DeepSeek-V2-Lite's sizes on a GPU: right, and the same in graphs with dependent launch."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention.attention import GroupRows, LayerCache, PagedRows
from octavo.ops.attention.latent_attention import LatentHeads
from octavo.ops.linear.linear import Fused
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, REPLAYS = 4, 20
D, N, P, R, L, V = 1024, 16, 128, 32, 512, 128
BLOCK_SIZE = 64
STEPS: dict[str, tuple[list[int], list[int]]] = {
    "one": ([1], [700]),
    "sixteen": ([1] * 16, [1, 64, 65, *range(100, 1400, 100)]),
    "many": ([1] * 90, list(range(30, 480, 5))),
    "prompts": ([300, 1, 77], [300, 1000, 200]),
    "short prompts": ([100, 1, 33, 5], [100, 2000, 40, 1500]),
    "long prompts": ([700, 1, 129, 1, 50, 128], [2900, 3000, 129, 1, 400, 1300]),
}
"""Rows and contexts of sequences."""


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


class Chain:
    """Layers of projections and latent attention that all depend on the one before."""

    def __init__(self, query_lens: list[int], seq_lens: list[int], cache_dtype: torch.dtype) -> None:
        torch.manual_seed(len(seq_lens))
        T, counts = sum(query_lens), [-(-length // BLOCK_SIZE) for length in seq_lens]
        order = torch.randperm(sum(counts)).int()
        tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        slots: list[int] = []
        for s, (rows, length, end) in enumerate(zip(query_lens, seq_lens, accumulate(counts), strict=True)):
            tables[s, : counts[s]] = order[end - counts[s] : end]
            positions = range(length - rows, length)
            slots += [int(tables[s, i // BLOCK_SIZE]) * BLOCK_SIZE + i % BLOCK_SIZE for i in positions]
        starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32).cuda()
        group = GroupRows(torch.tensor(slots).cuda(), tables.cuda())
        lens = torch.tensor(seq_lens, dtype=torch.int32).cuda()
        self.rows = PagedRows((group,), starts, lens, max(query_lens))
        angles = torch.rand(T, R, device="cuda") * 6
        self.angles = angles.cos(), angles.sin()
        self.start_TD = random(T, D)
        self.x_TD = torch.empty_like(self.start_TD)
        self.layers = [self._layer(sum(counts), cache_dtype) for _ in range(LAYERS)]

    def _layer(self, num_blocks: int, cache_dtype: torch.dtype) -> tuple[list[Tensor], LatentHeads, LayerCache]:
        shapes = (N * (P + 2 * R), D), (L + 2 * R, D), (D, N * V)
        projections = [random(*shape, scale=shape[1] ** -0.5) for shape in shapes]
        maps = random(N, L, P, scale=P**-0.5), random(N, V, L, scale=L**-0.5)
        heads = LatentHeads(*maps, random(L, scale=0.1) + 1, 1e-6, (P + 2 * R) ** -0.5)
        entries = random(num_blocks, 1, BLOCK_SIZE, 2 * R + L).to(cache_dtype)
        return projections, heads, LayerCache(entries, entries)

    def run(self) -> Tensor:
        self.x_TD.copy_(self.start_TD)
        x = self.x_TD
        for (query, key, output), heads, cache in self.layers:
            q, kv = ops.linear(x, query), ops.linear(x, key)
            out_TNV = ops.latent_attention(q, kv, heads, *self.angles, cache, self.rows)
            x = ops.linear(out_TNV.flatten(1), output, Fused(residual_TN=x))
        return x


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("step", STEPS)
def test_a_layer_does_what_the_reference_does(step: str, cache_dtype: torch.dtype) -> None:
    chain = Chain(*STEPS[step], cache_dtype)
    (query, key, _), heads, cache = chain.layers[0]
    q, kv = ops.linear(chain.start_TD, query), ops.linear(chain.start_TD, key)
    entries = cache.keys.clone()
    own = LayerCache(entries, entries)
    found_TNV = ops.latent_attention(q, kv, heads, *chain.angles, cache, chain.rows)
    wanted_TNV = ops.latent_attention.reference(q, kv, heads, *chain.angles, own, chain.rows)
    if cache_dtype == torch.bfloat16:
        torch.testing.assert_close(cache.keys, own.keys, rtol=2**-7, atol=2**-9)
    error_T = (found_TNV - wanted_TNV).float().flatten(1).norm(dim=1) / wanted_TNV.float().flatten(1).norm(dim=1)
    limit = 1.5e-2 if cache_dtype == torch.bfloat16 else 1e-1  # a key between two numbers of float8 may become either
    assert error_T.max() < limit, error_T.max()


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("step", STEPS)
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(step: str, cache_dtype: torch.dtype) -> None:
    chain = Chain(*STEPS[step], cache_dtype)
    expected = assert_a_graph_gives_the_same_bits(chain.run, chain.x_TD, REPLAYS)
    assert expected.isfinite().all()


def test_a_row_has_the_same_bits_alone_and_among_others_where_asked_for() -> None:
    from octavo_kernels.triton.launch import invariant

    chain, row, sequence = Chain(*STEPS["prompts"], torch.bfloat16), 300, 1
    (query, key, _), heads, cache = chain.layers[0]
    (slots_T, tables_SB), lens_S = chain.rows.groups[0], chain.rows.seq_lens_S
    group = GroupRows(slots_T[row : row + 1], tables_SB[sequence : sequence + 1])
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    alone = PagedRows((group,), starts, lens_S[sequence : sequence + 1], 1)
    with invariant():
        q, kv = ops.linear(chain.start_TD, query), ops.linear(chain.start_TD, key)
        whole_TNV = ops.latent_attention(q, kv, heads, *chain.angles, cache, chain.rows)
        own = (part[row : row + 1] for part in (q, kv, *chain.angles))
        part_TNV = ops.latent_attention(next(own), next(own), heads, *own, cache, alone)
        assert torch.equal(part_TNV[0], whole_TNV[row])
