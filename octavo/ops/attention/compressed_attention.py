"""Attention over the last positions and over entries, each of which stands for a group of earlier ones (DeepSeek-V4).

A token gives a value and a gate for each number of an entry; the entry of a group of M tokens is the sum of their
values, weighted by the softmax of their gates plus a bias of the place within the group, then normalised and rotated to
the position of the group's first token. Where groups overlap, a token gives two of each: for the entry of the next
group, and for that of its own. A row sees the entries of the groups that are complete at its position: all of them, or
those that an indexer chooses for it.

The entry of a group is in the block of its last token, at ``(position % block_size) // M``, so that blocks are all that
is cached; values and gates of the tokens of incomplete groups are cached for a window.

Shapes: T tokens of the step, N heads, H head dim, R rotated pairs, M tokens of a group, G groups, W numbers of a part
of an entry, C = W or, where groups overlap, 2 W, J heads of the indexer, I their width, E entries, Q rows of one
sequence that are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import MAX_SCRATCH, HeadLayout, LayerCache, PagedRows, Rule, context, store_kv
from octavo.ops.dispatch import op
from octavo.ops.norms import rms_norm

# ---- turn_tails: Norms and rotations of heads whose last numbers are rotated.


@op
def turn_tails(
    x_TNH: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    *,
    eps: float | None = None,
    norm_H: Tensor | None = None,
    turns_back: bool = False,
) -> Tensor:
    """Normalise each head by its root mean square if ``eps`` is given, with weights if there are any, and rotate
    adjacent pairs of its last 2 R numbers by the token's angles (float32), or by their negatives; a new tensor [T, N,
    H] of x's dtype."""
    wide = torch.promote_types(x_TNH.dtype, torch.float32)
    y_TNH = x_TNH.to(wide)
    if eps is not None:
        y_TNH = y_TNH * torch.rsqrt(y_TNH.square().mean(dim=-1, keepdim=True) + eps)
        if norm_H is not None:
            y_TNH = y_TNH * norm_H
        y_TNH = y_TNH.to(x_TNH.dtype).to(wide)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    if turns_back:
        sin_T1R = -sin_T1R
    plain, pairs = y_TNH.split_with_sizes((y_TNH.shape[2] - 2 * cos_TR.shape[1], 2 * cos_TR.shape[1]), dim=-1)
    first, second = pairs[..., ::2], pairs[..., 1::2]
    turned = torch.stack((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    return torch.cat((plain, turned.flatten(-2)), dim=-1).to(x_TNH.dtype)


# ---- compress: Caches what tokens give to entries, and the entries of the groups that they complete.


class Compression(NamedTuple):
    """How a layer makes entries. An entry has parts, each with weights, a norm and a rotation of its own."""

    rate: int
    """M"""
    overlaps: bool
    biases: tuple[Tensor, ...]
    """float32 [M, C] of each part."""
    norms: tuple[Tensor, ...]
    """RMSNorm weights [W] of each part."""
    norm_eps: float

    @property
    def widths(self) -> tuple[int, ...]:
        """Those of the parts."""
        return tuple(len(norm_W) for norm_W in self.norms)


@op
def compress(
    given_TX: Tensor,
    how: Compression,
    cos_TR: Tensor,
    sin_TR: Tensor,
    inputs: LayerCache,
    entries: LayerCache,
    rows: PagedRows,
) -> None:
    """Store the rows of ``given`` in the cache ``inputs``, and the entries of groups whose last token is a row in
    ``entries``.

    A row has the values of each part, C numbers, then the gates of each part; an entry has W numbers of each part. The
    angles (float32) of a row that completes a group are those of the group's first position. Both caches have one head,
    and one tensor for keys and values. Nothing is stored for padding rows.
    """
    store_kv(given_TX.unsqueeze(1), given_TX.unsqueeze(1), inputs.keys, inputs.keys, rows.of(inputs).slot_mapping_T)
    M, block_size = how.rate, inputs.keys.shape[2]
    for s, own, begin in _sequences(rows):
        end = begin + own.stop - own.start
        first, last = begin // M, end // M
        if first == last:
            continue
        start = max(0, first - how.overlaps) * M
        table_B = rows.of(inputs).block_tables_SB[s]
        given_1CX, _ = context(inputs.keys, inputs.keys, table_B, start, last * M, given_TX.shape[1])
        ends_G = torch.arange(first + 1, last + 1, device=given_TX.device) * M - 1
        rows_G = own.start + ends_G - begin
        made = _pooled(given_1CX.view(-1, M, given_TX.shape[1]), how, is_first=first == 0)
        parts = [
            turn_tails.reference(
                rms_norm(part_GW.to(given_TX.dtype), norm_W, how.norm_eps).unsqueeze(1), cos_TR[rows_G], sin_TR[rows_G]
            )[:, 0]
            for part_GW, norm_W in zip(made, how.norms, strict=True)
        ]
        blocks_G = rows.of(entries).block_tables_SB[s][ends_G // block_size]
        entries.keys[blocks_G, 0, ends_G % block_size // M] = torch.cat(parts, dim=1).to(entries.keys.dtype)


def _pooled(given_GMX: Tensor, how: Compression, is_first: bool) -> list[Tensor]:
    """The weighted sums of each part, float32 at least; where groups overlap, of all groups but the first, before which
    there is none if ``is_first``."""
    wide = torch.promote_types(given_GMX.dtype, torch.float32)
    sizes = [bias_MC.shape[1] for bias_MC in how.biases]
    values, gates = (half.split_with_sizes(sizes, dim=-1) for half in given_GMX.to(wide).chunk(2, dim=-1))
    found = []
    for value_GMC, gate_GMC, bias_MC in zip(values, gates, how.biases, strict=True):
        gate_GMC = gate_GMC + bias_MC
        if how.overlaps:
            value_GMC = _with_groups_before(value_GMC, 0.0, is_first)
            gate_GMC = _with_groups_before(gate_GMC, float("-inf"), is_first)
        found.append((value_GMC * gate_GMC.softmax(dim=1)).sum(dim=1))
    return found


def _with_groups_before(x_GMC: Tensor, nothing: float, is_first: bool) -> Tensor:
    """What each group's entry is made of, [G, 2 M, W]: the first halves of the rows of the group before, and the second
    halves of its own."""
    before, own = x_GMC.chunk(2, dim=-1)
    if is_first:
        return torch.cat((torch.cat((torch.full_like(before[:1], nothing), before[:-1])), own), dim=1)
    return torch.cat((before[:-1], own[1:]), dim=1)


# ---- choose_entries: The indexer of a layer: which entries each row attends to.


@op
def choose_entries(
    q_TJI: Tensor, weights_TJ: Tensor, rate: int, count: int, block_size: int, entries: LayerCache, rows: PagedRows
) -> Tensor:
    """The numbers of the entries with the highest ``sum_j weight_j relu(q_j . key)``, int32 [T, count], in order; -1
    behind them where a row sees fewer.

    Keys are the last I numbers of entries; weights are float32. Sums are computed in float32 at least.
    """
    T, J, width = q_TJI.shape
    chosen_TE = torch.full((T, count), -1, dtype=torch.int32, device=q_TJI.device)
    wide = torch.promote_types(q_TJI.dtype, torch.float32)
    for s, own, begin in _sequences(rows):
        keys_EX = _entries(entries, rows.of(entries).block_tables_SB[s], begin + own.stop - own.start, rate, block_size)
        E = len(keys_EX)
        keys_EI = keys_EX[:, -width:].to(wide)
        step = max(1, MAX_SCRATCH // (J * max(1, E)))
        for first in range(own.start, own.stop, step):
            part = slice(first, min(own.stop, first + step))
            seen_Q = (torch.arange(part.start, part.stop, device=q_TJI.device) - own.start + begin + 1) // rate
            every_E = torch.arange(E, device=q_TJI.device)
            is_hidden_QE = every_E >= seen_Q.unsqueeze(1)
            products_QJE = (q_TJI[part].to(wide) @ keys_EI.mT).relu_()
            scores_QE = (products_QJE * weights_TJ[part].to(wide).unsqueeze(2)).sum(dim=1)
            best = scores_QE.masked_fill_(is_hidden_QE, float("-inf")).topk(min(count, E), dim=1)
            found = best.indices.masked_fill(best.indices >= seen_Q.unsqueeze(1), E).sort(dim=1).values
            chosen_TE[part, : found.shape[1]] = found.masked_fill(found == E, -1).int()
    return chosen_TE


# ---- compressed_attention: Attention over a window and over entries.


@op
def compressed_attention(
    q_TNH: Tensor,
    heads: HeadLayout,
    cache: LayerCache,
    rows: PagedRows,
    entries: LayerCache | None = None,
    rate: int = 0,
    chosen_TE: Tensor | None = None,
) -> Tensor:
    """Attend from every row to the positions of its window, its own included, and to the entries of groups of ``rate``
    tokens that are complete at its position, or to those ``chosen`` (see ``choose_entries``); a new tensor [T, N, H].

    Keys are values: the cache holds one head and one tensor of them, this step's included; an entry's key is its first
    H numbers. ``heads`` says the window, the scale, and the logit of each head that is added to the denominator. The
    results of padding rows are unspecified. Sums are computed in float32 at least.
    """
    N, H = heads.num_heads, heads.head_dim
    wide = torch.promote_types(q_TNH.dtype, torch.float32)
    rule = Rule(heads.scale, 0, 0.0, None if heads.sinks_N is None else heads.sinks_N[:, None], None)
    out_TNH = torch.empty_like(q_TNH)
    for s, own, begin in _sequences(rows):
        end = begin + own.stop - own.start
        keys_EH = q_TNH.new_empty(0, H)
        if entries is not None:
            table_B = rows.of(entries).block_tables_SB[s]
            keys_EH = _entries(entries, table_B, end, rate, cache.keys.shape[2])[:, :H]
        E, step = len(keys_EH), max(1, min(heads.window, MAX_SCRATCH // (N * (len(keys_EH) + 2 * heads.window))))
        for first in range(begin, end, step):
            last = min(end, first + step)
            seen_from = max(0, first - heads.window + 1)
            near_1CH = context(cache.keys, cache.keys, rows.of(cache).block_tables_SB[s], seen_from, last, H)[0]
            keys_CH = torch.cat((near_1CH[0].to(wide), keys_EH.to(wide)))
            position_Q1 = torch.arange(first, last, device=q_TNH.device).unsqueeze(1)
            distance_QC = position_Q1 - torch.arange(seen_from, last, device=q_TNH.device)
            part = slice(own.start + first - begin, own.start + last - begin)
            if chosen_TE is None:
                is_far_QE = (
                    torch.arange(E, device=q_TNH.device) >= (position_Q1 + 1) // rate if E else distance_QC[:, :0]
                )
            else:
                chosen_QE = chosen_TE[part].long()
                is_far_QE = chosen_QE.new_ones(last - first, E + 1, dtype=torch.bool)
                is_far_QE = is_far_QE.scatter_(1, chosen_QE.where(chosen_QE >= 0, E), False)[:, :E]
            is_hidden = torch.cat(((distance_QC < 0) | (distance_QC >= heads.window), is_far_QE.bool()), dim=1)
            products = (q_TNH[part].to(wide).transpose(0, 1) @ keys_CH.mT).contiguous()
            out_TNH[part] = (rule.weights(products, is_hidden) @ keys_CH).transpose(0, 1).to(q_TNH.dtype)
    return out_TNH


def _sequences(rows: PagedRows) -> Iterator[tuple[int, slice, int]]:
    """Each sequence that has rows: its number, which rows they are, and the position of the first."""
    starts = rows.cu_seqlens_q.tolist()
    for s, seq_len in enumerate(rows.seq_lens_S.tolist()):
        if starts[s + 1] > starts[s]:
            yield s, slice(starts[s], starts[s + 1]), seq_len - (starts[s + 1] - starts[s])


def _entries(entries: LayerCache, table_B: Tensor, seq_len: int, rate: int, block_size: int) -> Tensor:
    """The entries of a sequence's complete groups, [E, numbers of an entry]."""
    ends_E = torch.arange(1, seq_len // rate + 1, device=table_B.device) * rate - 1
    return entries.keys[table_B[ends_E // block_size], 0, ends_E % block_size // rate]
