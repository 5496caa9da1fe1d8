"""The attention of a layer over a paged cache: a row for each of many sequences, or many rows of one.

Contexts lie in blocks of any order, other blocks for each call. Norms of queries and keys are not measured; rotation
and the storing of what is new are part of the call.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention.attention import GroupRows, HeadLayout, LayerCache, PagedRows
from octavo.ops.attention.latent_attention import LatentHeads
from octavo.plugins import GPU
from octavo.runtime.memory_budget import DEFAULTS
from octavo.steps.graph_shapes import LONG_CONTEXT, LONG_SEQS
from octavo_bench.device.kernel_cases import MatrixSizes
from octavo_bench.device.measured_case import ALONE_BYTES, DEVICE, DTYPE, EPS, Call, Case, Floor, num_turns, random_rows
from octavo_fleet.sim.costs.roofline import Latent

BLOCK = DEFAULTS[GPU].block_size
MOST_SEQUENCES = 256
LATENT_MAPS = 16
"""Layers whose maps into and out of the latent space take turns."""
CACHES = {"bf16": DTYPE, "fp8": torch.float8_e4m3fn}


class PagedCase(Case):
    """Contexts of one length in a pool of blocks, and the rows of steps over them."""

    def __init__(self, context: int, cache: str, is_prompt: bool, position_bytes: int) -> None:
        """``is_prompt``: the rows are the last of one sequence. ``position_bytes``: what is cached of a position."""
        self.context, self.format, self.is_prompt, self.position_bytes = context, cache, is_prompt, position_bytes
        self.fewest_rows, self.most_rows = (2, context) if is_prompt else (1, MOST_SEQUENCES)
        positions = max(2 * context if is_prompt else MOST_SEQUENCES * context, ALONE_BYTES // position_bytes)
        self.order = torch.randperm(-(-positions // BLOCK), device=DEVICE).to(torch.int32)

    def pool(self, kv_heads: int, width: int) -> Tensor:
        """The cache of keys, or of values, [blocks, K, BLOCK, H]."""
        shape = len(self.order), kv_heads, BLOCK, width
        some = torch.randn(1 << 20, device=DEVICE).to(CACHES[self.format])
        every = torch.empty(shape, dtype=some.dtype, device=DEVICE)
        for part in torch.split(every.view(-1), len(some)):
            part.copy_(some[: len(part)])
        return every

    def sizes(self, T: int) -> tuple[int, int]:
        """Number of sequences, and rows of each."""
        return (1, T) if self.is_prompt else (T, 1)

    def pairs(self, T: int) -> int:
        """Rows and the positions that they attend to."""
        S, rows = self.sizes(T)
        return S * (rows * self.context - rows * (rows - 1) // 2)

    def steps(self, T: int) -> list[PagedRows]:
        """The rows of as many steps as take turns."""
        return [self._step(T, turn) for turn in range(num_turns(self.sizes(T)[0] * self.context * self.position_bytes))]

    def _step(self, T: int, turn: int) -> PagedRows:
        (S, rows), blocks = self.sizes(T), -(-self.context // BLOCK)
        places = torch.arange(S * blocks, device=DEVICE) + turn * S * blocks
        tables_SB = self.order[places % len(self.order)].view(S, blocks)
        positions = torch.arange(self.context - rows, self.context, device=DEVICE)
        slots = tables_SB[:, positions // BLOCK].long() * BLOCK + positions % BLOCK
        starts = torch.arange(0, T + 1, rows, dtype=torch.int32, device=DEVICE)
        lengths = torch.full((S,), self.context, dtype=torch.int32, device=DEVICE)
        is_long = not self.is_prompt and S <= LONG_SEQS and self.context >= LONG_CONTEXT
        return PagedRows((GroupRows(slots.flatten(), tables_SB),), starts, lengths, rows, has_long_context=is_long)


class AttentionCase(PagedCase):
    """Attention of several KV heads."""

    def __init__(self, sizes: MatrixSizes, context: int, cache: str, is_prompt: bool) -> None:
        N, K, H = sizes.heads, sizes.kv_heads, sizes.head_dim
        super().__init__(context, cache, is_prompt, 2 * K * H * CACHES[cache].itemsize)
        self.family = "prefill attention" if is_prompt else "decode attention"
        self.name = f"{N} heads of {H}, {K} KV heads, {context:,} positions"
        self.heads = HeadLayout(N, K, H, H**-0.5)
        self.cache = LayerCache(self.pool(K, H), self.pool(K, H))

    def calls(self, T: int) -> list[Call]:
        qkv, angles = random_rows(T, sum(self.heads.sizes)), _angles(T, self.heads.head_dim)
        return [functools.partial(ops.attention, qkv, self.heads, *angles, self.cache, step) for step in self.steps(T)]

    def work(self, T: int) -> Floor:
        width = self.heads.num_heads * self.heads.head_dim
        cached = self.sizes(T)[0] * self.context * self.position_bytes
        return Floor(cached + T * (sum(self.heads.sizes) + width) * DTYPE.itemsize, 4 * width * self.pairs(T))


class LatentCase(PagedCase):
    """Latent attention with its maps into the latent space and out of it, of single rows."""

    family = "latent attention"

    def __init__(self, num_heads: int, latent: Latent, context: int) -> None:
        H = latent.rank + latent.rotated
        super().__init__(context, "bf16", False, H * DTYPE.itemsize)
        self.latent, self.num_heads = latent, num_heads
        self.name = f"{num_heads} heads, latents of {latent.rank}, {context:,} positions"
        self.heads = [self._heads() for _ in range(LATENT_MAPS)]
        keys = self.pool(1, H)
        self.cache = LayerCache(keys, keys)

    def _heads(self) -> LatentHeads:
        N, (rank, rotated, plain, value, _) = self.num_heads, self.latent
        maps = [torch.randn(N, *size, device=DEVICE).div_(rank**0.5) for size in ((rank, plain), (value, rank))]
        key_map, value_map = (each.to(DTYPE) for each in maps)
        norm = torch.ones(rank, device=DEVICE, dtype=DTYPE)
        return LatentHeads(key_map, value_map, norm, EPS, (plain + rotated) ** -0.5)

    def calls(self, T: int) -> list[Call]:
        latent = self.latent
        q, kv = random_rows(T, self._query_width), random_rows(T, latent.rank + latent.rotated)
        angles = _angles(T, latent.rotated)
        return [
            functools.partial(
                ops.latent_attention, q, kv, self.heads[turn % LATENT_MAPS], *angles, self.cache, step, None
            )
            for turn, step in enumerate(self.steps(T))
        ]

    @property
    def _query_width(self) -> int:
        return self.num_heads * (self.latent.plain + self.latent.rotated)

    def work(self, T: int) -> Floor:
        N, (rank, rotated, plain, value, _) = self.num_heads, self.latent
        map_weights = N * rank * (plain + value)
        rows = T * (self._query_width + rank + rotated + N * value)
        read = T * self.context * self.position_bytes + (map_weights + rows) * DTYPE.itemsize
        return Floor(read, 2 * T * map_weights + 2 * N * (2 * rank + rotated) * self.pairs(T))


def _angles(T: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.rand(T, width // 2, device=DEVICE) * 6
    return angles.cos(), angles.sin()
