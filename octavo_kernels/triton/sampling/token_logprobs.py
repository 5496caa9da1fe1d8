"""``token_logprobs``: a program for each chunk of the vocabulary, then one for each row that combines them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.sampling.sampling import Logprobs, token_logprobs
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch
from octavo_kernels.triton.sampling.truncation import LOWEST, ordered
from octavo_kernels.triton.split_sums import LOG2_E

CHUNK = 2048

_CHUNK = tl.constexpr(CHUNK)
_LAST_ID = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _chunk_kernel(
    logits: tl.tensor, row_stride: tl.tensor, tokens_R: tl.tensor, peaks_RC: tl.tensor, masses_RC: tl.tensor,
    above_RC: tl.tensor, keys_RCn: tl.tensor, V: tl.tensor, n: tl.tensor, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Of a chunk: the largest logit, the sum of exp(logit - largest), logits above the token's, the n best keys."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    after_predecessor(PDL)
    token = tl.load(tokens_R + row)
    if token >= 0:
        logits += row.to(tl.int64) * row_stride
        ids = chunk * _CHUNK + tl.arange(0, _CHUNK)
        x = tl.load(logits + ids, mask=ids < V, other=0.0).to(tl.float32)
        x = tl.where(ids < V, x, LOWEST)
        peak = tl.max(x, 0)
        at = row * tl.num_programs(0) + chunk
        tl.store(peaks_RC + at, peak)
        tl.store(masses_RC + at, tl.sum(tl.exp2((x - peak) * LOG2_E), 0))
        tl.store(above_RC + at, tl.sum((x > tl.load(logits + token).to(tl.float32)).to(tl.int32), 0))
        keys = tl.where(ids < V, (ordered(x) << 32) | (_LAST_ID - ids), _NO_KEY)
        for i in range(n):
            best = tl.max(keys, 0)
            tl.store(keys_RCn + at.to(tl.int64) * n + i, best)
            keys = tl.where(keys == best, _NO_KEY, keys)


@triton.jit
def _row_kernel(
    logits: tl.tensor, row_stride: tl.tensor, tokens_R: tl.tensor, peaks_RC: tl.tensor, masses_RC: tl.tensor,
    above_RC: tl.tensor, keys_RCn: tl.tensor, logprob_R: tl.tensor, rank_R: tl.tensor, top_ids_Rn: tl.tensor,
    top_logprobs_Rn: tl.tensor, num_chunks: tl.tensor, n: tl.tensor, CHUNKS: tl.constexpr, KEYS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row; CHUNKS and KEYS are the numbers of chunks and of their keys, filled up to powers of two."""
    row = tl.program_id(0)
    after_predecessor(PDL)
    token = tl.load(tokens_R + row)
    if token >= 0:
        logits += row.to(tl.int64) * row_stride
        c = tl.arange(0, CHUNKS)
        is_chunk_C = c < num_chunks
        peaks_C = tl.load(peaks_RC + row * num_chunks + c, mask=is_chunk_C, other=LOWEST)
        masses_C = tl.load(masses_RC + row * num_chunks + c, mask=is_chunk_C, other=0.0)
        largest = tl.max(peaks_C, 0)
        log_total = largest + tl.log(tl.sum(masses_C * tl.exp2((peaks_C - largest) * LOG2_E), 0))
        tl.store(logprob_R + row, tl.load(logits + token).to(tl.float32) - log_total)
        tl.store(rank_R + row, 1 + tl.sum(tl.load(above_RC + row * num_chunks + c, mask=is_chunk_C, other=0), 0))
        k = tl.arange(0, KEYS)
        keys = tl.load(keys_RCn + row.to(tl.int64) * num_chunks * n + k, mask=k < num_chunks * n, other=_NO_KEY)
        for i in range(n):
            best = tl.max(keys, 0)
            id = _LAST_ID - (best & _LAST_ID).to(tl.int32)
            tl.store(top_ids_Rn + row * n + i, id)
            tl.store(top_logprobs_Rn + row * n + i, tl.load(logits + id).to(tl.float32) - log_total)
            keys = tl.where(keys == best, _NO_KEY, keys)


MOST_TOP = 32
"""More tokens are faster sorted than chosen one by one."""


@token_logprobs.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def token_logprobs_triton(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Logprobs:
    """See ``ops.token_logprobs``; logits whose rows are not dense are copied."""
    R, V = logits_RV.shape
    assert 0 <= n <= V, f"{n} likeliest of {V} tokens were asked for"
    if n > MOST_TOP:
        found = token_logprobs_triton(logits_RV, tokens_R, 0)
        logprobs_RV = logits_RV.float().log_softmax(dim=1)
        top_ids_Rn = logits_RV.float().sort(dim=1, descending=True, stable=True).indices[:, :n]
        return found._replace(top_ids_Rn=top_ids_Rn.int(), top_logprobs_Rn=logprobs_RV.gather(1, top_ids_Rn))
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    device, num_chunks = logits_RV.device, triton.cdiv(V, CHUNK)
    found = Logprobs(
        torch.empty(R, dtype=torch.float32, device=device),
        torch.empty(R, dtype=torch.int32, device=device),
        torch.empty(R, n, dtype=torch.int32, device=device),
        torch.empty(R, n, dtype=torch.float32, device=device),
    )
    if R == 0:
        return found
    peaks_RC = torch.empty(R, num_chunks, dtype=torch.float32, device=device)
    masses_RC = torch.empty(R, num_chunks, dtype=torch.float32, device=device)
    above_RC = torch.empty(R, num_chunks, dtype=torch.int32, device=device)
    keys_RCn = torch.empty(R, num_chunks, n, dtype=torch.int64, device=device)
    given = (logits_RV, logits_RV.stride(0), tokens_R, peaks_RC, masses_RC, above_RC, keys_RCn)
    launch(_chunk_kernel, (num_chunks, R), *given, V, n, num_warps=8)
    chunks, keys = triton.next_power_of_2(num_chunks), triton.next_power_of_2(max(num_chunks * n, 1))
    launch(_row_kernel, (R,), *given, *found, num_chunks, n, CHUNKS=chunks, KEYS=keys, num_warps=8)
    return found
