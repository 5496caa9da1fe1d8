"""``sample``: one kernel reduces chunks of the vocabulary, and another chooses each row's token.

The first has a program for each row and chunk of the vocabulary; it leaves the best token of the chunk and, of rows
that truncate, what ``truncation`` starts from. The second has a program for each row. It knows the winner at once,
unless the row truncates: then it finds the least score to keep, and the race is run again only in chunks whose winner
is dropped while it is ahead of all winners that are kept. One CUDA graph serves rows of any parameters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.sampling.sampling import (
    BANNED,
    GREEDY_BELOW,
    NOT_FINITE,
    NOTHING_LEFT,
    OUT_OF_RANGE,
    OVERFLOWN,
    SampleParams,
    sample,
)
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch
from octavo_kernels.triton.sampling.noise import minus_log_exponentials, row_key
from octavo_kernels.triton.sampling.truncation import GROUP, least_kept, ordered
from octavo_kernels.triton.split_sums import LOG2_E

CHUNK = 2048
"""Tokens of a program; masses are sums over a chunk, so it must not depend on the number of rows."""
GROUPS = CHUNK // GROUP
MAX_VOCABULARY = 2**24
"""Tokens are counted in float32."""
SAME_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Trailing bits that all numbers of these types have in common as float32, but for their sign."""

_CHUNK = tl.constexpr(CHUNK)
_GROUPS = tl.constexpr(GROUPS)
_GROUP = tl.constexpr(GROUP)
_LOWEST = tl.constexpr(BANNED)
_HIGHEST = tl.constexpr(OVERFLOWN)
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NOT_FINITE = tl.constexpr(NOT_FINITE)
_NOTHING_LEFT = tl.constexpr(NOTHING_LEFT)
_OUT_OF_RANGE = tl.constexpr(OUT_OF_RANGE)
_NO_KEY = tl.constexpr(-(2**63))
_NOT_FINITE_KEY = tl.constexpr(2**63 - 1)
_LAST_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _race_kernel(
    logits: tl.tensor, row_stride: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor, top_ks: tl.tensor,
    top_ps: tl.tensor, seeds: tl.tensor, positions: tl.tensor, token_ids: tl.tensor, keys_RC: tl.tensor,
    peaks_RG: tl.tensor, masses_RC: tl.tensor, V: tl.tensor, IS_CUDA: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One chunk of one row."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    after_predecessor(PDL)
    ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < V, other=0.0).to(tl.float32)
    temperature = tl.load(temperatures + row)
    keys = _race(x, ids, token_ids, temperature, tl.load(seeds + row), tl.load(positions + row), V, IS_CUDA)
    at = row * tl.num_programs(0) + chunk
    tl.store(keys_RC + at, tl.max(keys, 0))
    if _truncates(temperature, tl.load(min_ps + row), tl.load(top_ks + row), tl.load(top_ps + row), V):
        x = tl.where(ids < V, x, _LOWEST)
        peaks = tl.max(x.reshape(_GROUPS, _GROUP), 1)
        tl.store(peaks_RG + at * _GROUPS + tl.arange(0, _GROUPS), peaks)
        scores = tl.maximum(x * (1.0 / temperature), _LOWEST)
        tl.store(masses_RC + at, tl.sum(tl.exp2((scores - tl.max(scores, 0)) * LOG2_E), 0))


@triton.jit
def _settle_kernel(
    logits: tl.tensor, row_stride: tl.tensor, temperatures: tl.tensor, min_ps: tl.tensor, top_ks: tl.tensor,
    top_ps: tl.tensor, seeds: tl.tensor, positions: tl.tensor, token_ids: tl.tensor, keys_RC: tl.tensor,
    peaks_RG: tl.tensor, masses_RC: tl.tensor, live_RG: tl.tensor, tokens_R: tl.tensor, V: tl.tensor,
    CHUNKS: tl.constexpr, SHIFT: tl.constexpr, IS_CUDA: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row; CHUNKS is the number of chunks, filled up to a power of two."""
    row = tl.program_id(0)
    after_predecessor(PDL)
    logits += row.to(tl.int64) * row_stride
    num_chunks = tl.cdiv(V, _CHUNK)
    c = tl.arange(0, CHUNKS)
    keys_C = tl.load(keys_RC + row * num_chunks + c, mask=c < num_chunks, other=_NO_KEY)
    token = _token_of(tl.max(keys_C, 0), logits, V)
    temperature = tl.load(temperatures + row)
    min_p, top_k, top_p = tl.load(min_ps + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if (token >= 0) & _truncates(temperature, min_p, top_k, top_p, V):
        scale = 1.0 / temperature
        first_group = row * num_chunks * _GROUPS
        live, peaks, masses = live_RG + first_group, peaks_RG + first_group, masses_RC + row * num_chunks
        cut = least_kept(logits, live, peaks, masses, scale, min_p, top_k, top_p, V, CHUNKS, _GROUPS, SHIFT)
        seed, position = tl.load(seeds + row), tl.load(positions + row)
        best = _best_kept(logits, keys_C, cut, token_ids, temperature, seed, position, V, IS_CUDA)
        token = _token_of(best, logits, V)
    if token_ids is not None:
        token = tl.where(token >= 0, tl.load(token_ids + tl.maximum(token, 0)).to(tl.int32), token)
    tl.store(tokens_R + row, token)


@triton.jit
def _race(
    x: tl.tensor, ids: tl.tensor, token_ids: tl.tensor, temperature: tl.tensor, seed: tl.tensor, position: tl.tensor,
    V: tl.tensor, IS_CUDA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """For each column a key, int64: the larger the better, with what makes the logits bad above all.

    The upper half is the value in the race, the lower the id, so that the smaller wins a tie.
    """
    if temperature < _GREEDY_BELOW:
        values = x
    else:
        factor, offset = row_key(seed, position)
        tokens = ids
        if token_ids is not None:
            tokens = tl.load(token_ids + ids, mask=ids < V, other=0).to(tl.int32)
        values = x * (1.0 / temperature) + minus_log_exponentials(tokens, factor, offset, IS_CUDA)
    keys = (ordered(values) << 32) | (_LAST_ID - ids)
    keys = tl.where(tl.abs(x) < float("inf"), keys, _NOT_FINITE_KEY)
    return tl.where(ids < V, keys, _NO_KEY)


@triton.jit
def _best_kept(
    logits: tl.tensor, keys_C: tl.tensor, cut: tl.tensor, token_ids: tl.tensor, temperature: tl.tensor, seed: tl.tensor,
    position: tl.tensor, V: tl.tensor, IS_CUDA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The best key among tokens whose score reaches ``cut``, from the best keys of all chunks."""
    scale = 1.0 / temperature
    ids_C = _LAST_ID - (keys_C & _LAST_ID).to(tl.int32)
    x_C = tl.load(logits + ids_C, mask=keys_C != _NO_KEY, other=0.0).to(tl.float32)
    is_kept_C = x_C * scale >= cut
    best = tl.max(tl.where(is_kept_C, keys_C, _NO_KEY), 0)
    doubtful_C = tl.where(is_kept_C, _NO_KEY, keys_C)
    bound = tl.max(doubtful_C, 0)
    while bound > best:
        chunk = (_LAST_ID - (bound & _LAST_ID).to(tl.int32)) // _CHUNK
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(logits + ids, mask=ids < V, other=0.0).to(tl.float32)
        keys = _race(x, ids, token_ids, temperature, seed, position, V, IS_CUDA)
        best = tl.maximum(best, tl.max(tl.where(x * scale >= cut, keys, _NO_KEY), 0))
        doubtful_C = tl.where(doubtful_C == bound, _NO_KEY, doubtful_C)
        bound = tl.max(doubtful_C, 0)
    return best


@triton.jit
def _truncates(temperature: tl.tensor, min_p: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, V: tl.tensor) -> tl.tensor:
    return (temperature >= _GREEDY_BELOW) & ((min_p > 0) | ((top_k > 0) & (top_k < V)) | (top_p < 1))


@triton.jit
def _token_of(key: tl.tensor, logits: tl.tensor, V: tl.tensor) -> tl.tensor:
    """The token of a row's best key, or the row's error code; int32."""
    id = _LAST_ID - (key & _LAST_ID).to(tl.int32)
    x = tl.load(logits + id, mask=key != _NOT_FINITE_KEY, other=0.0).to(tl.float32)
    value = key >> 32
    infinity = ordered(tl.full([], float("inf"), tl.float32))
    token = tl.where((value >= infinity) | (x >= _HIGHEST), _OUT_OF_RANGE, id)
    token = tl.where((value <= ordered(tl.full([], float("-inf"), tl.float32))) | (x <= _LOWEST), _NOTHING_LEFT, token)
    return tl.where(key == _NOT_FINITE_KEY, _NOT_FINITE, token)


@sample.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def sample_triton(logits_RV: Tensor, params: SampleParams, token_ids_V: Tensor | None = None) -> Tensor:
    """See ``ops.sample``; logits whose rows are not dense are copied."""
    R, V = logits_RV.shape
    assert 0 < V <= MAX_VOCABULARY, f"a vocabulary of {V} tokens cannot be sampled from"
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    num_chunks = triton.cdiv(V, CHUNK)
    device = logits_RV.device
    tokens_R = torch.empty(R, dtype=torch.int32, device=device)
    if R == 0:
        return tokens_R
    keys_RC = torch.empty(R, num_chunks, dtype=torch.int64, device=device)
    masses_RC = torch.empty(R, num_chunks, dtype=torch.float32, device=device)
    peaks_RG = torch.empty(R, num_chunks * GROUPS, dtype=torch.float32, device=device)
    live_RG = torch.empty(R, num_chunks * GROUPS, dtype=torch.int32, device=device)
    given = (logits_RV, logits_RV.stride(0), *params, token_ids_V, keys_RC, peaks_RG, masses_RC)
    launch(_race_kernel, (num_chunks, R), *given, V, IS_CUDA=logits_RV.is_cuda, num_warps=8)
    launch(
        _settle_kernel,
        (R,),
        *given,
        live_RG,
        tokens_R,
        V,
        CHUNKS=triton.next_power_of_2(num_chunks),
        SHIFT=SAME_BITS[logits_RV.dtype],
        IS_CUDA=logits_RV.is_cuda,
        num_warps=16,
        maxnreg=64,  # two programs on a multiprocessor
    )
    return tokens_R
