"""Attention over a part of each context, whose results for all parts give attention over the whole of it.

Shapes: T tokens of the step, N heads, K kv heads, H head dim, L latent, C positions of this part of a context, P parts,
Q rows of one sequence that are computed together, X = H + 1 or L + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.attention.attention import MAX_SCRATCH, HeadLayout, LayerCache, PagedRows, Rule, context, stored_heads
from octavo.ops.collective import ContextPart
from octavo.ops.dispatch import op


@op
def partial_attention(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    cache: LayerCache,
    rows: PagedRows,
    part: ContextPart,
) -> Tensor:
    """``attention`` over the positions of each context that ``part`` says, which are all that the cache holds.

    A new tensor [T, N, X], float32 at least: the heads' outputs, and last the logarithm of the sum of the exponentials
    of their scores; zeros and -inf for a row that sees none of these positions. Position p is in the place of p // P:
    the slots of the step's rows are such, and negative where a row's position is in another part; ``seq_lens`` count
    all positions. There are no windows, slopes or sinks.
    """
    check_heads(heads)
    q_TNH = stored_heads(qkv_TW, heads, cos_TR, sin_TR, cache, rows)
    T, N, H = q_TNH.shape
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    out_TNX = q_TNH.new_zeros(T, N, H + 1, dtype=wide)
    out_TNX[..., H] = float("-inf")
    rule = Rule(heads.scale, 0, heads.softcap, None, cache.scales)
    starts = rows.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(rows.seq_lens_S.tolist()):
        count, num_rows = part.count(seq_len), starts[s + 1] - starts[s]
        if not count or not num_rows:
            continue
        keys, values = context(cache.keys, cache.values, rows.of(cache).block_tables_SB[s], 0, count, H)
        k_KCH, v_KCH = rule.scaled(keys.to(wide), values.to(wide))
        position_C = part.rank + part.size * torch.arange(count, device=qkv_TW.device)
        step = max(1, MAX_SCRATCH // (N * count))
        for first in range(0, num_rows, step):
            own = slice(starts[s] + first, min(starts[s] + first + step, starts[s + 1]))
            position_Q = torch.arange(own.start, own.stop, device=qkv_TW.device) + seq_len - starts[s + 1]
            is_hidden_QC = position_C > position_Q[:, None]
            q_KGQH = q_TNH[own].to(wide).view(-1, len(k_KCH), N // len(k_KCH), H).permute(1, 2, 0, 3)
            products = (q_KGQH.flatten(1, 2) @ k_KCH.mT).view(N, -1, count)
            scores_NQC = rule.scores(products, is_hidden_QC)
            sums_NQ = scores_NQC.logsumexp(dim=-1)
            sees_none_NQ1 = (sums_NQ == float("-inf"))[..., None]
            weights = (scores_NQC - sums_NQ[..., None]).exp_().masked_fill_(sees_none_NQ1, 0)
            out = (weights.view(len(k_KCH), -1, count) @ v_KCH).view(N, -1, H)
            out_TNX[own] = torch.cat((out, sums_NQ[..., None]), dim=-1).transpose(0, 1)
    return out_TNX


@op
def partial_latent_attention(
    q_TNH: Tensor, latent_size: int, scale: float, cache: LayerCache, rows: PagedRows, part: ContextPart
) -> Tensor:
    """As ``partial_attention``, over a cache of latents, given the queries that ``store_latents`` returns.

    A new tensor [T, N, X]: the weighted latents, and the logarithm of the sum.
    """
    _, N, H = q_TNH.shape
    layout = HeadLayout(N, 1, H, scale, shares_cache=True)
    found_TNX = partial_attention(q_TNH.flatten(1), layout, None, None, cache, rows, part)
    return found_TNX[..., H - latent_size :].contiguous()


def check_heads(heads: HeadLayout) -> None:
    """Assert that heads have nothing of which partial attention knows nothing."""
    assert not heads.window, "partial attention has no windows"
    assert heads.slopes_N is None, "partial attention has no slopes"
    assert heads.bias_TNE is None, "partial attention has no biases of distances"
    assert heads.sinks_N is None, "sinks are added when parts are merged"


@op
def merge_parts(parts_PTNX: Tensor, sinks_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The outputs over whole contexts, a new tensor [T, N, H], given those over each of their P parts.

    ``sinks``: see ``paged_attention``. Rows without any sum are unspecified. Sums are of the parts' type.
    """
    sums_PTN = parts_PTNX[..., -1]
    if sinks_N is not None:
        sums_PTN = torch.cat((sums_PTN, sinks_N.to(sums_PTN.dtype).expand(1, *sums_PTN.shape[1:])))
    weights_PTN = sums_PTN.softmax(dim=0)[: len(parts_PTNX)]
    return (parts_PTNX[..., :-1] * weights_PTN[..., None]).sum(dim=0).to(dtype)
