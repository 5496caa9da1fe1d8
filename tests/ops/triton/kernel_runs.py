"""Every kernel for CUDA devices, once, on small shapes with ragged edges.

For tools that watch memory and make everything a hundred times slower::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.ops.triton.kernel_runs

Without torch's cache of memory, every tensor is an allocation of its own, so that a step beside it shows. All kernels
are compiled first, many at a time. What they give is not looked at here.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention.attention import GroupRows, HeadLayout, KVScales, LayerCache, PagedRows, RopeSet
from octavo.ops.attention.cached_rows import STORED, row_length
from octavo.ops.attention.choose_blocks import attend_to_blocks
from octavo.ops.attention.choose_head_blocks import HeadBlocks
from octavo.ops.attention.compressed_attention import Compression
from octavo.ops.attention.latent_attention import EXPANDED_WIDTHS, LatentHeads
from octavo.ops.collective import Collective, ContextPart
from octavo.ops.hyper_connections import StreamMaps
from octavo.ops.linear.grouped_linear import Number, PackedGroups
from octavo.ops.linear.linear import Fused, LowRankStack
from octavo.ops.linear.scaled_linear import ScaledValues
from octavo.ops.moe import ClampedSwish, Experts, GroupedExperts, Routing, SoftcappedSwish
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.selective_scan import ScanChannels
from octavo.ops.recurrent.state_space import StateSpaceHeads
from octavo.ops.sampling.sampling import Adjustments, SampleParams
from octavo.ops.stepping import LastResults, StagedRows
from octavo_kernels.triton.attention.latent_prompts import Expanded, expand
from octavo_kernels.triton.experts.gather_rows import gather_rows
from octavo_kernels.triton.linear.gemv import GemvConfig, gemv

Call = Callable[[], object]
DTYPES = (torch.bfloat16, torch.float32)
PACKED: tuple[Number, ...] = ("int4", "uint4", "int8", "e4m3")
EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
BLOCK_SIZE = 16
SINGLE, RAGGED = ([0, 1, 1, 1], [0, 1, 40, 17]), ([0, 5, 1, 19], [0, 5, 40, 33])
"""Rows and contexts of some sequences, the first of them padding: before its block table is nothing."""
LONG = [70, 1, 0, 19], [90, 40, 0, 33]
"""Those of recurrences, of which one is computed in chunks."""


class Maker:
    """Small tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape).to(self.device, dtype)

    def ints(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def rows(self, query_lens: list[int], seq_lens: list[int]) -> PagedRows:
        """Each sequence has three blocks of its own; there is one padded row where sequences have several."""
        slots: list[int] = []
        for s, (q_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            first = 3 * s * BLOCK_SIZE
            slots += range(first + seq_len - q_len, first + seq_len)
            slots += [-1] if max(query_lens) == 1 and not q_len else []
        slots += [-1] if max(query_lens) > 1 else []
        tables = torch.arange(3 * len(seq_lens), dtype=torch.int32, device=self.device).view(-1, 3)
        starts = self.ints([0, *itertools.accumulate(query_lens)])
        return PagedRows(
            (GroupRows(self.ints(slots, torch.int64), tables),), starts, self.ints(seq_lens), max(query_lens)
        )

    def cache(self, num_blocks: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_blocks, heads, BLOCK_SIZE, width, device=self.device).to(dtype)


def calls(device: torch.device) -> Iterator[tuple[str, Call]]:
    """What is to be run, with names."""
    make = Maker(device)
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for what, call in itertools.chain(
            _linears(make, dtype),
            _packed(make, dtype),
            _attentions(make, dtype),
            _parts_of_contexts(make, dtype),
            _layers(make, dtype),
            _recurrences(make, dtype),
            _logits(make, dtype),
        ):
            yield f"{what} {name}", call
    yield from _long_prompt(make)
    yield from _ends_of_a_step(make)
    yield from _drafts(make)
    yield from _exchanges(device)


def _linears(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """One row, some, and many; everything that stands before and after the product, and nothing."""
    for T, K in itertools.product((1, 5, 33, 100), (96, 80)):
        x, norm = make.floats(T, K, dtype=dtype), make.floats(K, dtype=dtype)
        weight, bias = make.floats(200, K, dtype=dtype), make.floats(200, dtype=dtype)
        residual = make.floats(T, 200, dtype=dtype)
        yield f"linear {T}x{K}", functools.partial(ops.linear, x, weight, Fused(bias, residual_TN=residual))
        yield f"linear {T}x{K} gated", functools.partial(ops.linear, x, weight, Fused(None, norm, 1e-6, None, "silu"))
    x, weight, norm = (make.floats(*shape, dtype=dtype) for shape in ((1, 4096), (2100, 4096), (4096,)))
    yield "linear of a wide row", functools.partial(ops.linear, x, weight, Fused(None, norm, 1e-6))
    if dtype == torch.bfloat16:
        walk = GemvConfig(rows=4, block_k=2048, warps=4, programs=1)
        yield "linear in a walk", functools.partial(gemv, x, weight, Fused(None, norm, 1e-6), walk)
    x, weight = make.floats(70, 96, dtype=dtype), make.floats(200, 96, dtype=dtype)
    yield "invariant linear", functools.partial(_invariantly, functools.partial(ops.linear, x, weight))
    by_head = functools.partial(
        ops.head_linear, make.floats(5, 3, 24, dtype=dtype), make.floats(3, 40, 24, dtype=dtype)
    )
    yield "head_linear", by_head
    yield "invariant head_linear", functools.partial(_invariantly, by_head)
    index, keys = make.cache(6, 1, 24, dtype), make.cache(6, 2, 16, dtype)
    indexed = LayerCache(keys, keys, index_keys=index)
    queries, rows = make.floats(6, 4, 24, dtype=dtype), make.rows([2, 3], [20, 30])
    yield "choose_blocks", functools.partial(ops.choose_blocks, queries, indexed, rows, 4, 2)
    heads, angles = HeadLayout(4, 2, 16, 0.25), (make.floats(6, 8), make.floats(6, 8))
    chosen = torch.zeros(6, 2, dtype=torch.int64, device=make.device)
    qkv = make.floats(6, 8 * 16, dtype=dtype)
    yield "small blocks", functools.partial(attend_to_blocks, qkv, heads, angles, indexed, rows, chosen, 4)


def _packed(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Weights of 4 and 8 bits, with and without zeros and minima, for few, some and many rows; experts as well."""
    if dtype == torch.float32:
        return
    for number, T in itertools.product(PACKED, (1, 5, 33, 700)):
        weight = _groups(make, number, 208, 256)
        x, norm, residual = make.floats(T, 256, dtype=dtype), make.floats(256, dtype=dtype), make.floats(T, 208)
        plain = functools.partial(ops.grouped_linear, x, weight, Fused(residual_TN=residual.to(dtype)))
        yield f"grouped_linear {number} {T}", plain
        gated = functools.partial(ops.grouped_linear, x, weight, Fused(None, norm, 1e-6, None, "silu"))
        yield f"grouped_linear {number} {T} gated", gated
        yield f"invariant grouped_linear {number} {T}", functools.partial(_invariantly, plain)
    streamed: tuple[tuple[Number, int], ...] = (("int4", 128), ("uint4", 128), ("uint4", 32), ("int8", 16))
    for number, group in streamed:  # sizes that can be, with zeros and with minima
        weight, x, norm = _groups(make, number, 416, 1024, group), make.floats(1, 1024, dtype=dtype), make.floats(1024)
        single = functools.partial(ops.grouped_linear, x, weight, Fused(None, norm.to(dtype), 1e-6, None, "silu"))
        yield f"grouped_linear {number} {group} streamed", single
        yield f"grouped_output_mlp {number} {group}", _output_mlp(make, number, group, dtype)
    for number, T in itertools.product(PACKED[:2], (3, 33, 130)):  # whose copies overlap products
        weight, x = _groups(make, number, 416, 1024, 128), make.floats(T, 1024, dtype=dtype)
        gated = functools.partial(ops.grouped_linear, x, weight, Fused(activation="silu"))
        yield f"grouped_linear {number} pipelined {T} gated", gated
        weight, x = _groups(make, number, 200, 1000, 1000), make.floats(T, 1000, dtype=dtype)
        yield f"grouped_linear {number} pipelined {T}", functools.partial(ops.grouped_linear, x, weight)
    eights = [ScaledValues(make.floats(208, 256).to(kind), make.floats(208, 1), 256) for kind in EIGHT_BITS]
    for scaled, T in itertools.product(eights, (1, 40, 90)):
        x, norm, residual = make.floats(T, 256, dtype=dtype), make.floats(256, dtype=dtype), make.floats(T, 208)
        plain = functools.partial(ops.scaled_linear, x, scaled, Fused(residual_TN=residual.to(dtype)))
        yield f"scaled_linear {T}", plain
        yield (
            f"scaled_linear {T} gated",
            functools.partial(ops.scaled_linear, x, scaled, Fused(None, norm, 1e-6, None, "silu")),
        )
        yield f"invariant scaled_linear {T}", functools.partial(_invariantly, plain)
    for T in (1, 3, 90):
        gate_up, down = (_groups(make, "int4", rows, columns) for rows, columns in ((7 * 512, 64), (7 * 64, 256)))
        ids = torch.stack([torch.randperm(7)[:3] for _ in range(T)]).to(make.device)
        experts = GroupedExperts(7, gate_up, down)
        x = make.floats(T, 64, dtype=dtype)
        order = torch.randperm(3 * T, device=make.device, dtype=torch.int32)
        yield f"gather_rows {T}", functools.partial(gather_rows, x, order, make.ints([1, 3 * T]))
        for some in (experts, experts._replace(num_routed=14)):
            call = functools.partial(ops.grouped_moe, x, ids, make.floats(T, 3), some)
            yield f"grouped_moe {T} of {some.num_routed}", call


def _output_mlp(make: Maker, number: Number, group: int, dtype: torch.dtype) -> Call:
    """What follows attention, for one row."""
    shapes = (512, 1024), (2 * 1024, 512), (512, 1024)
    output, gate_up, down = (_groups(make, number, *shape, group) for shape in shapes)
    attended, x, norm = (make.floats(*shape, dtype=dtype) for shape in ((1, 1024), (1, 512), (512,)))
    return functools.partial(ops.grouped_output_mlp, attended, x, output, norm, 1e-6, gate_up, down, "silu")


def _groups(make: Maker, number: Number, N: int, K: int, group: int = 64) -> PackedGroups:
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8, device=make.device)
    count = K // group
    zeros = make.floats(N, count) if number == "uint4" else None
    minima = make.floats(N, count) if number == "int8" else None
    return PackedGroups.pack(number, codes, make.floats(N, count).bfloat16().float(), zeros, minima_NG=minima)


def _attentions(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    packed = tuple(STORED.values())
    cache_dtypes = (dtype, torch.float8_e4m3fn, *packed) if dtype == torch.bfloat16 else (dtype,)
    for (lens, H), cache_dtype in itertools.product(((SINGLE, 64), (RAGGED, 64), (RAGGED, 80)), cache_dtypes):
        rows = make.rows(*lens)
        T, (N, K) = len(rows.groups[0].slot_mapping_T), (6, 2)
        norm, sinks = make.floats(H, dtype=dtype), make.floats(N)
        angles = make.floats(T, H // 2)
        scaled = [None] if cache_dtype != torch.float8_e4m3fn else [None, KVScales(make.floats(K), make.floats(K))]
        keys, values = (make.cache(12, K, row_length(cache_dtype, H), cache_dtype) for _ in range(2))
        qkv = make.floats(T, (N + 2 * K) * H, dtype=dtype)
        kinds = (
            HeadLayout(N, K, H, 0.1, norm, norm, 1e-6),
            HeadLayout(N, K, H, 0.1, window=20, softcap=5.0, sinks_N=sinks),
            HeadLayout(N, K, H, 0.1, slopes_N=sinks),
            HeadLayout(
                *(N, K, H, 0.1), window=20, sinks_N=make.floats(T, N), bias_TNE=make.floats(T, N, 24, dtype=dtype)
            ),
        )
        for heads, scales in itertools.product(kinds, scaled):
            cache = LayerCache(keys, values, scales=scales)
            plain = functools.partial(ops.attention, qkv, heads, angles, angles, cache, rows)
            yield f"attention {max(lens[0])} {H} {cache_dtype}", plain
            yield f"invariant attention {max(lens[0])} {H} {cache_dtype}", functools.partial(_invariantly, plain)
        if lens == SINGLE and dtype == torch.bfloat16:
            cache, long = LayerCache(keys, values), replace(rows, has_long_context=True)
            yield (
                f"attention by warp {cache_dtype}",
                functools.partial(ops.attention, qkv, kinds[1], None, None, cache, long),
            )
        for N_latent in () if cache_dtype in packed else (4, 40):
            latents = make.cache(12, 1, 2 * 8 + 64, cache_dtype)
            shapes = (N_latent, 64, 24), (N_latent, 40, 64), (64,)
            key_map, value_map, norm = (make.floats(*shape, dtype=dtype) for shape in shapes)
            more = (make.floats(4), 20) if N_latent == 4 else ()
            latent = functools.partial(
                ops.latent_attention, make.floats(T, N_latent * 40, dtype=dtype), make.floats(T, 80, dtype=dtype),
                LatentHeads(key_map, value_map, norm, 1e-6, 0.1, *more),
                make.floats(T, 8), make.floats(T, 8), LayerCache(latents, latents), rows,
            )  # fmt: skip
            yield f"latent_attention {max(lens[0])} {N_latent} {cache_dtype}", latent
        if cache_dtype == dtype:
            yield from _compressed(make, dtype, rows, lens)
        if cache_dtype not in packed:
            queries, weights = make.floats(T, 16, 40, dtype=dtype), make.floats(T, 16)
            cache = LayerCache(keys, values, index_keys=make.cache(12, 1, 40, cache_dtype))
            choose = functools.partial(ops.choose_keys, queries, weights, cache, rows, 20)
            yield f"choose_keys {max(lens[0])} {cache_dtype}", choose
        indexed = LayerCache(keys, values, index_keys=make.cache(12, 1, row_length(cache_dtype, H), cache_dtype))
        choice = functools.partial(ops.choose_head_blocks, make.floats(T, K, H, dtype=dtype), indexed, rows)
        yield f"choose_head_blocks {max(lens[0])} {H} {cache_dtype}", functools.partial(choice, HeadBlocks(24, 1, 1))


def _compressed(
    make: Maker, dtype: torch.dtype, rows: PagedRows, lens: tuple[list[int], ...]
) -> Iterator[tuple[str, Call]]:
    T, heads = len(rows.groups[0].slot_mapping_T), HeadLayout(6, 1, 64, 0.1, window=9, sinks_N=make.floats(6))
    angles, norm = make.floats(T, 8), make.floats(64, dtype=dtype)
    queries, weights = make.floats(T, 6, 64, dtype=dtype), make.floats(T, 5)
    turned = functools.partial(ops.turn_tails, queries, angles, angles, eps=1e-5, norm_H=norm)
    yield f"turn_tails {max(lens[0])}", turned
    for rate, parts in ((4, (64, 40)), (20, (64,))):
        overlaps, sizes = rate == 4, [width * (1 + (rate == 4)) for width in parts]
        how = Compression(
            rate,
            overlaps,
            tuple(make.floats(rate, size) for size in sizes),
            tuple(make.floats(width, dtype=dtype) for width in parts),
            1e-5,
        )
        given, keys, inputs = (make.cache(12, 1, width, dtype) for width in (2 * sum(sizes), 64, 2 * sum(sizes)))
        made = make.cache(12, 1, sum(parts), dtype)[:, :, : -(-BLOCK_SIZE // rate)].contiguous()
        cache, inputs_of, entries = (LayerCache(x, x) for x in (keys, inputs, made))
        row = given.view(-1, 2 * sum(sizes))[:T].contiguous()
        compress = functools.partial(ops.compress, row, how, angles, angles, inputs_of, entries, rows)
        yield f"compress {max(lens[0])} {rate}", compress
        attend = functools.partial(ops.compressed_attention, queries, heads, cache, rows, entries, rate)
        yield f"compressed_attention {max(lens[0])} {rate}", attend
        if overlaps:
            index = make.floats(T, 5, 40, dtype=dtype)
            choose = functools.partial(ops.choose_entries, index, weights, rate, 3, BLOCK_SIZE, entries, rows)
            yield f"choose_entries {max(lens[0])}", choose
            chosen = torch.zeros(T, 3, dtype=torch.int32, device=make.device)
            yield f"compressed_attention {max(lens[0])}, chosen", functools.partial(attend, chosen)
    maps = StreamMaps(make.floats(24, 400), make.floats(24), make.floats(3), 4, 5, 1e-6, 1e-5)
    streams, ys = make.floats(T, 400, dtype=dtype), make.floats(T, 100, dtype=dtype)
    yield f"enter_streams {max(lens[0])}", functools.partial(ops.enter_streams, streams, maps)
    mixes = make.floats(T, 4), make.floats(T, 4, 4)
    yield f"leave_streams {max(lens[0])}", functools.partial(ops.leave_streams, ys, streams, *mixes)
    several = streams.view(T, 4, 100)[:, :3]
    for count in (1, 3):
        attend = functools.partial(ops.attend_streams, several, ys, make.floats(count, 100), 1e-5)
        yield f"attend_streams {max(lens[0])} {count}", attend


def _parts_of_contexts(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """The second of two parts of each context, of heads that are many to a KV head."""
    part, (N, H) = ContextPart(1, 2), (20, 64)
    for lens in (SINGLE, RAGGED):
        rows = make.rows(*lens).owned(part)
        T = len(rows.groups[0].slot_mapping_T)
        qkv, angles, cache = (
            make.floats(T, (N + 2) * H, dtype=dtype),
            make.floats(T, H // 2),
            make.cache(12, 1, H, dtype),
        )
        plain = functools.partial(
            ops.partial_attention, qkv, HeadLayout(N, 1, H, 0.1), angles, angles, LayerCache(cache, cache), rows, part
        )
        yield f"partial_attention {max(lens[0])}", plain
        yield f"invariant partial_attention {max(lens[0])}", functools.partial(_invariantly, plain)
        queries = make.floats(T, N, H, dtype=dtype)
        latent = functools.partial(ops.partial_latent_attention, queries, 48, 0.1, LayerCache(cache, cache), rows, part)
        yield f"partial_latent_attention {max(lens[0])}", latent
    parts = make.floats(2, 5, N, H + 1)
    yield "merge_parts", functools.partial(ops.merge_parts, parts, make.floats(N), dtype)


def _long_prompt(make: Maker) -> Iterator[tuple[str, Call]]:
    """A batch of one token, a prompt of 1,100 tokens and padding: some GPUs have kernels of their own for it."""
    heads = HeadLayout(4, 2, 128, 0.1)
    ends = make.ints([0, 1, 1100])
    slots = make.ints([-1] * 1101, torch.int64)
    rows = PagedRows(
        (GroupRows(slots, make.ints([[i, *range(18)] for i in range(2)])),), ends, make.ints([70, 1210]), 1100
    )
    zeros = torch.zeros(2, 19, 2, 64, 128, device=make.device).bfloat16()
    cache = LayerCache(zeros[0], zeros[1])
    qkv, angles = make.floats(1101, 8 * 128, dtype=torch.bfloat16), make.floats(1101, 64)
    yield "attention of a long prompt", functools.partial(ops.attention, qkv, heads, angles, angles, cache, rows)
    for P, Q, V in ((24, 16, 40), EXPANDED_WIDTHS):
        q, kv, key_map, value_map, norm, latents = (
            make.floats(*shape, dtype=torch.bfloat16)
            for shape in ((1101, 4 * (P + Q)), (1101, 64 + Q), (4, 64, P), (4, V, 64), (64,), (19, 1, 64, Q + 64))
        )
        turns = angles[:, : Q // 2]
        latent_heads, cache = LatentHeads(key_map, value_map, norm, 1e-6, 0.1), LayerCache(latents, latents)
        call = functools.partial(ops.latent_attention, q, kv, latent_heads, turns, turns, cache, rows)
        yield f"latent_attention of a long prompt, values {V}", call
    parts = (make.floats(*shape, dtype=torch.bfloat16) for shape in ((4, 2048, P), (2048, Q), (4, 2048, V)))
    yield "expanded keys", functools.partial(expand, latent_heads, cache, rows, Expanded(*parts), 64)


def _layers(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    x = make.floats(7, 100, dtype=dtype)
    weight, bias = make.floats(100, dtype=dtype), make.floats(100, dtype=dtype)
    yield "rms_norm", functools.partial(ops.rms_norm, x, weight, 1e-6)
    yield "layer_norm", functools.partial(ops.layer_norm, x, weight, bias, 1e-6)
    (q, k, v), table = (make.floats(70, count, 24, dtype=dtype) for count in (4, 2, 2)), make.floats(4, 9)
    for window, by_distance in ((0, None), (5, None), (0, table)):
        call = functools.partial(ops.encoder_attention, q, k, v, [3, 70], 0.2, window, by_distance)
        yield f"encoder_attention {window} {by_distance is None}", call
    qkv, angles = make.floats(70, 12, 72, dtype=dtype), make.floats(70, 72)[:, :36]
    yield "encoder_attention of images", functools.partial(ops.encoder_attention, *qkv.chunk(3, 1), [70], 0.2)
    yield "apply_rope", functools.partial(ops.apply_rope, *qkv.split(6, 1), angles, angles)
    caches, rows = make.cache(4, 3, 24, dtype), make.floats(2, 3, 24, dtype=dtype)
    stored = functools.partial(ops.store_kv, rows, rows, caches, caches, make.ints([7, -1], torch.int64))
    yield "store_kv", stored
    heads, angles = HeadLayout(6, 3, 24, 24**-0.5), make.floats(2, 12)
    qkv, cache = make.floats(2, 12 * 24, dtype=dtype), LayerCache(caches, caches)
    slots = make.ints([7, -1], torch.int64)
    yield "store_keys", functools.partial(ops.store_keys, qkv, heads, angles, angles, cache, slots)
    yield "gelu", functools.partial(ops.gelu, x, True)
    yield "silu_and_mul", functools.partial(ops.silu_and_mul, x)
    yield "sigmoid_and_mul", functools.partial(ops.sigmoid_and_mul, x, x)
    yield "add_scaled", functools.partial(ops.add_scaled, x, x[:, :1], x)
    yield "gelu_and_mul", functools.partial(ops.gelu_and_mul, x, False)
    for T, activation in ((1, "silu"), (3, SoftcappedSwish(4.0, 25.0)), (90, ClampedSwish(1.7, 7.0))):
        weights = make.floats(7, 48, 40, dtype=dtype), make.floats(7, 40, 24, dtype=dtype)
        biases = (make.floats(7, 48, dtype=dtype), make.floats(7, 40, dtype=dtype)) if T > 3 else (None, None)
        ids = torch.stack([torch.randperm(7)[:3] for _ in range(T)]).to(make.device)
        experts = Experts(*weights, activation, *biases)  # type: ignore[arg-type]
        for some in (experts, replace(experts, num_routed=14)):
            call = functools.partial(ops.moe, make.floats(T, 40, dtype=dtype), ids, make.floats(T, 3), some)
            yield f"moe {T} of {some.num_routed}", call
        slots = make.ints([[0, -1]] * 7, torch.int64)
        for load in (None, make.ints([0] * 7, torch.int64)):
            call = functools.partial(ops.local_expert_ids, ids, slots, load)
            yield f"local_expert_ids {T} {load is None}", call
        rows, router = make.floats(T, 40, dtype=dtype), make.floats(20, 40, dtype=dtype)
        routing = Routing(3, groups=(4, 2), correction_X=make.floats(20))
        yield f"route {T}", functools.partial(ops.route, rows, make.floats(40, dtype=dtype), 1e-6, router, routing)
        table, columns = torch.zeros(8 * T, 6, dtype=torch.uint8, device=make.device), make.ints([0, 3])
        chosen = make.ints([[[0, 1, 2]] * T] * 2)
        yield f"keep_routes {T}", functools.partial(ops.keep_routes, chosen, columns, make.ints(range(T)), table)
    for T, R in ((5, 4), (150, 21)):
        stack = LowRankStack(
            make.floats(3, 2, R, 80, dtype=dtype),
            make.floats(3, 60, R, dtype=dtype),
            make.ints([[0, 40], [44, 16]]),
            40,
        )
        places = make.ints([(i % 4) - 1 for i in range(T)])
        lora = functools.partial(
            ops.stacked_lora, make.floats(T, 60, dtype=dtype), make.floats(T, 80, dtype=dtype), places, stack
        )
        yield f"stacked_lora {T}", lora


def _recurrences(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Ops with recurrent state, for single rows and for prompts."""
    N, K, V, W = 2, 24, 40, 4
    for counts, lengths in (SINGLE, LONG):
        starts = make.ints([0, *itertools.accumulate(counts)])
        rows = StateRows(starts, make.ints(lengths), make.ints([2, 0, -1, 1]), max(counts))
        T, name = sum(counts), f"of up to {max(counts)} rows"
        window, state = make.floats(3, W - 1, V, dtype=dtype), make.floats(3, N, K, V)
        x, weight = make.floats(T, 3 * V, dtype=dtype), make.floats(W, V, dtype=dtype)
        conv = functools.partial(ops.causal_conv, x[:, :V], weight, make.floats(V), window, rows, "silu")
        yield f"causal_conv {name}", conv
        yield f"gated_conv {name}", functools.partial(ops.gated_conv, x, weight, None, window, rows)
        for num_decays in (N, N * K):
            heads = DeltaHeads(1, N, K, V, make.floats(N), make.floats(num_decays), make.floats(V, dtype=dtype), 1e-6)
            qkv, dt, beta, gate = (
                make.floats(T, size, dtype=dtype) for size in (sum(heads.sizes), num_decays, N, N * V)
            )
            delta = functools.partial(ops.gated_delta, qkv, dt, beta, gate, heads, state, rows)
            yield f"gated_delta {num_decays} {name}", delta
        space = StateSpaceHeads(N, V, 1, K, make.floats(N), make.floats(N), make.floats(N))
        xbc, dt = make.floats(T, sum(space.sizes), dtype=dtype), make.floats(T, N, dtype=dtype)
        yield f"state_space {name}", functools.partial(ops.state_space, xbc, dt, space, state, rows)
        channels = ScanChannels(make.floats(K, V), make.floats(V), make.floats(V))
        inner, dt, b, c = (make.floats(T, size, dtype=dtype) for size in (V, V, K, K))
        scan = functools.partial(ops.selective_scan, inner, dt, b, c, channels, make.floats(3, 1, K, V), rows)
        yield f"selective_scan {name}", scan
        square, qkv = make.floats(3, N, K, K), make.floats(T, 3 * N * K, dtype=dtype)
        yield (
            f"linear_attention {name}",
            functools.partial(ops.linear_attention, qkv, make.floats(N), square, rows, "silu"),
        )
    norm = functools.partial(ops.gated_norm, x, x, make.floats(3 * V), 1e-6, V, "silu", is_gated_first=True)
    yield "gated_norm", norm


def _logits(make: Maker, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    R, V = 5, 3000
    logits = make.floats(R, V, dtype=dtype)
    params = SampleParams(
        make.floats(R).abs(), make.floats(R).abs() / 100, make.ints([0, 5, 50, 0, 1]),
        make.floats(R).abs().clamp(0.1, 1), make.ints(list(range(R)), torch.int64), make.ints([9] * R),
    )  # fmt: skip
    yield "sample", functools.partial(ops.sample, logits, params)
    token_ids = torch.arange(0, 2 * V, 2, device=make.device)
    yield "sample of a part", functools.partial(ops.sample, logits, params, token_ids)
    yield "token_logprobs", functools.partial(ops.token_logprobs, logits, make.ints([1, -1, 2, 3, V - 1]), 20)
    penalties = make.floats(R).abs() + 1
    adjustments = Adjustments(
        make.ints([[7] * 300, [V + 1] * 300]), make.ints([0, -1, 1, 0, -1]), make.ints([300, 2, 50, 0, 1]),
        make.ints([10] * R), penalties, penalties, penalties, make.ints([[3, -1]] * R),
        make.floats(R, 2), make.ints([[V - 1, -1]] * R),
        torch.full((R, V // 8), 255, dtype=torch.uint8, device=make.device), make.ints([1, 0, 0, 1, 0], torch.bool),
    )  # fmt: skip
    yield "adjust_logits", functools.partial(ops.adjust_logits, logits, adjustments)


def _ends_of_a_step(make: Maker) -> Iterator[tuple[str, Call]]:
    is_cuda = make.device.type == "cuda"
    counter = make.ints([6])
    uploads = torch.zeros(4, 808, dtype=torch.uint8, pin_memory=is_cuda)
    uploads[:, 0] = 101
    yield "pull_step", functools.partial(ops.pull_step, uploads[0].to(make.device), uploads, counter)
    ids, tables = make.ints([-1, 8, 4, -1], torch.int64), torch.zeros(1, 3, 9, dtype=torch.int32, device=make.device)
    cells, last = make.ints([2, 0, 3], torch.int64), make.ints([5, 6, 7, 8])
    packed, width = make.ints(list(range(6))), make.ints([2])
    starts, samples = make.ints([0, 2, 4, 4]), make.ints([0, 2, 3, 3])
    positions, slots = make.ints([9, 10, 2, 3], torch.int64), make.ints([[9, 10, 2, 3]], torch.int64)
    rows = StagedRows(positions, slots, make.ints([10, 11, 4]), make.ints([11, 4, 0]), starts, samples, cells)
    results_of = LastResults(last, make.ints([3, 3, 7, -1]), make.ints([[1], [2], [3], [4]]))
    yield "stage_step", functools.partial(ops.stage_step, ids, rows, results_of, packed, width, tables, 8)
    sampled, indices = make.ints([4, 5, 6]), make.ints([0, 1, 3], torch.int64)
    yield "accept_drafts", functools.partial(ops.accept_drafts, sampled, ids, indices, samples)
    given = make.ints([-1, 7, -1])
    accepted = make.ints([1, 0, 0])
    yield "next_tokens", functools.partial(ops.next_tokens, ids, starts, samples, accepted, sampled, given, 100)
    yield "next_tokens", functools.partial(ops.next_tokens, ids, starts, None, None, sampled, given, 100)
    frequencies = torch.rand(24, device=make.device)
    rotary_angles = functools.partial(ops.rotary_angles, make.ints([0, 9, 70_000], torch.int64), frequencies, 1.0)
    yield "rotary_angles", rotary_angles
    chosen = RopeSet(make.ints([0, 1, 1], torch.int64), make.floats(2))
    yield "rotary_angles of sets", functools.partial(rotary_angles, chosen)
    shifts, axes = (
        make.ints([[0] * 3, [1] * 3, [2] * 3], torch.int64),
        make.ints([0] * 8 + [1] * 8 + [2] * 8, torch.int64),
    )
    axis_angles = functools.partial(ops.axis_angles, make.ints([0, 9, 70_000], torch.int64), shifts, axes)
    yield "axis_angles", functools.partial(axis_angles, frequencies, 1.0)
    results = torch.zeros(4, 9, dtype=torch.int32, pin_memory=is_cuda)
    ends, last_ends = make.ints([10, 11, 4]), make.ints([0] * 4)
    publish = functools.partial(ops.publish_tokens, sampled, ends, cells, last, last_ends, results, counter)
    yield "publish_tokens", publish
    yield "publish_tokens", functools.partial(publish, make.ints([1, 0, 0]), samples)


def _drafts(make: Maker) -> Iterator[tuple[str, Call]]:
    """Three sequences, of which the first has two drafts."""
    ids, positions = make.ints([3, 8, 4, 6, 7], torch.int64), make.ints([9, 10, 11, 2, 3], torch.int64)
    indices, samples = make.ints([0, 1, 2, 3, 4], torch.int64), make.ints([0, 3, 4, 5])
    yield "drafts_behind", functools.partial(ops.drafts_behind, ids, indices, samples)
    sampled, behind = make.ints([8, 5, 1, 2, -1]), make.ints([8, 4, -1, -1, -1], torch.int64)
    seeds, at = make.ints(list(range(5)), torch.int64), make.ints([10, 11, 12, 3, 4])
    yield "accept_by_chance", functools.partial(ops.accept_by_chance, sampled, behind, seeds, at, 0.6, 100)
    some = make.floats(5).abs()
    params = SampleParams(some, some, at, some, seeds, at)
    last = make.ints([1, 3, 4], torch.int64)
    for is_greedy in (False, True):
        yield "newest_tokens", functools.partial(ops.newest_tokens, sampled, params, last, 3, 100, is_greedy)
    tables = make.ints([[[1, 2], [3, 4], [5, 6]]])
    yield "draft_rows", functools.partial(ops.draft_rows, positions, last, make.ints([16, 3, 0]), tables, 3, 8)
    yield "keep_draft", functools.partial(ops.keep_draft, sampled[:3], make.ints([[0, 0]] * 3), 1, 100)


def _exchanges(device: torch.device) -> Iterator[tuple[str, Call]]:
    """Of a rank alone, which waits for itself."""
    from octavo_kernels.triton.collective import PeerCollective, buffer_bytes

    x = torch.zeros(3, 64, dtype=torch.bfloat16, device=device)
    for size, *limits in (("small", 1 << 20, 0), ("large", 0, 1 << 20), ("in two shots", 0, 0)):
        buffer = torch.zeros(buffer_bytes(1, 4096), dtype=torch.uint8, device=device)
        collective = PeerCollective(torch.tensor([buffer.data_ptr()], device=device), 0, 4096)
        collective.small_bytes, collective.one_shot_bytes = limits
        yield f"all_reduce {size}", functools.partial(_reduce, collective, x, buffer)
        for kind in (x.dtype, torch.uint8, torch.int64):
            yield f"all_gather {size} {kind}", functools.partial(collective.all_gather, x.to(kind))
        yield f"exchange {size}", functools.partial(collective.exchange, x[:, None])


def _reduce(collective: Collective, x: torch.Tensor, buffer: torch.Tensor) -> object:
    """``buffer`` is kept as long as the collective writes to it."""
    return collective.all_reduce(x, x.clone()), collective.all_reduce(x)


def _invariantly(call: Call) -> object:
    from octavo_kernels.triton.launch import invariant

    with invariant():
        return call()


def run_all(device: torch.device) -> int:
    """Compile what every call launches, then run the calls one by one, as in a graph; how many there were."""
    from octavo_kernels.triton.launch import compiling, pdl

    made = list(calls(device))
    with pdl():
        with compiling():
            for _, call in made:
                call()
        for name, call in made:
            print(name, flush=True)
            call()
            torch.cuda.synchronize()
    return len(made)


if __name__ == "__main__":
    torch.manual_seed(0)
    started = time.perf_counter()
    count = run_all(torch.device("cuda"))
    print(f"octavo: {count} calls, {time.perf_counter() - started:.0f} s", file=sys.stderr)
