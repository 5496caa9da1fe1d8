"""Steps of sequences over windows and compressed entries, and what they give in float64, row by row."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octavo.ops.attention.attention import GroupRows, HeadLayout, LayerCache, PagedRows
from octavo.ops.attention.compressed_attention import Compression

NAN = float("nan")


class Case:
    """Sequences whose last rows are those of a step, with one padding row behind them. Free slots hold NaN.

    Groups of the caches: the window's, that of what tokens give to entries, that of entries.
    """

    def __init__(
        self,
        rows_and_lengths: list[tuple[int, int]],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        rate: int = 4,
        overlaps: bool = True,
        parts: tuple[int, ...] = (24, 16),
        window: int = 7,
        block_size: int = 8,
        num_heads: int = 3,
        angles: int = 4,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.dtype, self.device, self.rate, self.block_size = dtype, device, rate, block_size
        self.lengths = [length for _, length in rows_and_lengths]
        self.counts = [count for count, _ in rows_and_lengths]
        H, X = parts[0], 2 * (1 + overlaps) * sum(parts)
        self.given = [torch.randn(length, X).to(dtype) for length in self.lengths]
        self.keys = [torch.randn(length, H).to(dtype) for length in self.lengths]
        self.angles = [torch.rand(length, angles) * 6 for length in self.lengths]
        """Of the first position of the group of each position."""
        widths = [width * (1 + overlaps) for width in parts]
        self.how = Compression(
            rate,
            overlaps,
            tuple(torch.randn(rate, width).to(device) for width in widths),
            tuple((torch.randn(width) * 0.2 + 1).to(device, dtype) for width in parts),
            1e-5,
        )
        sinks_N = torch.randn(num_heads).to(device)
        self.heads = HeadLayout(num_heads, 1, H, H**-0.5, window=window, sinks_N=sinks_N)
        num_blocks = [-(-length // block_size) for length in self.lengths]
        order = iter(torch.randperm(sum(num_blocks) + 2).int().split(1))
        tables = torch.full((len(self.lengths), max(num_blocks) + 1), 2**30, dtype=torch.int32)
        for s, count in enumerate(num_blocks):
            if count:
                tables[s, :count] = torch.cat([next(order) for _ in range(count)])
        slots = [
            int(tables[s, p // block_size]) * block_size + p % block_size
            for s, (count, length) in enumerate(rows_and_lengths)
            for p in range(length - count, length)
        ]
        starts = torch.tensor([0, *self.counts]).cumsum(0).int().to(device)
        group = GroupRows(torch.tensor([*slots, -1]).to(device), tables.to(device))
        lengths = torch.tensor(self.lengths).int().to(device)
        self.rows = PagedRows((group, group, group), starts, lengths, max(self.counts))
        self.T = sum(self.counts) + 1
        self.numbers = list(range(sum(self.counts)))
        """Of the rows that are no padding."""
        shape = sum(num_blocks) + 2, 1
        self.cache = self._cache((*shape, block_size, H), 0)
        self.inputs = self._cache((*shape, block_size, X), 1)
        self.entries = self._cache((*shape, -(-block_size // rate), sum(parts)), 2)
        for s, (count, length) in enumerate(rows_and_lengths):
            for p in range(length):
                place = int(tables[s, p // block_size]), 0, p % block_size
                if p >= length - count - window + 1:
                    self.cache.keys[place] = self.keys[s][p].to(device)
                if length - count - (1 + overlaps) * rate < p < length - count:
                    self.inputs.keys[place] = self.given[s][p].to(device)

    def _cache(self, shape: tuple[int, ...], group: int) -> LayerCache:
        cache = torch.full(shape, NAN, dtype=self.dtype, device=self.device)
        return LayerCache(cache, cache, group)

    def single(self) -> None:
        """Of sequences with one row each at most: row s belongs to sequence s, and those without one are padding."""
        self.numbers = [s for s, count in enumerate(self.counts) if count]
        group, self.T = self.rows.groups[0], len(self.counts)
        slots = torch.full((self.T,), -1, device=self.device)
        slots[self.numbers] = group.slot_mapping_T[:-1]
        group = GroupRows(slots, group.block_tables_SB)
        self.rows = replace(self.rows, groups=(group, group, group))

    def rows_of(self, whole: list[Tensor]) -> Tensor:
        """The rows of the step, with a padding row behind them, or as ``single`` says."""
        found = [part[length - count :] for part, count, length in zip(whole, self.counts, self.lengths, strict=True)]
        own = torch.cat(found)
        rows = torch.full((self.T, *own.shape[1:]), NAN, dtype=own.dtype)
        rows[self.numbers] = own
        return rows.to(self.device)

    def entries_of(self, s: int) -> Tensor:
        """All entries of a sequence in float64, [E, numbers]."""
        made, offset, parts = [], 0, [bias.shape[1] for bias in self.how.biases]
        given = self.given[s].double()
        for bias, norm, width in zip(self.how.biases, self.how.norms, parts, strict=True):
            value, gate = given[:, offset : offset + width], given[:, offset + sum(parts) :][:, :width]
            offset, W, rows = offset + width, len(norm), []
            for end in range(self.rate, len(given) + 1, self.rate):
                own = slice(end - self.rate, end)
                values, gates = value[own, -W:], gate[own, -W:] + bias.cpu().double()[:, -W:]
                if self.how.overlaps and end > self.rate:
                    before = slice(end - 2 * self.rate, end - self.rate)
                    values = torch.cat((value[before, :W], values))
                    gates = torch.cat((gate[before, :W] + bias.cpu().double()[:, :W], gates))
                row = (values * gates.softmax(dim=0)).sum(dim=0)
                row = row * (row.square().mean() + self.how.norm_eps) ** -0.5 * norm.cpu().double()
                rows.append(turned(row, self.angles[s][end - 1].double()))
            made.append(torch.stack(rows) if rows else given.new_empty(0, W))
        return torch.cat(made, dim=1)

    def put_entries(self) -> None:
        """Fill the cache of entries."""
        tables = self.rows.groups[2].block_tables_SB
        for s in range(len(self.lengths)):
            for e, entry in enumerate(self.entries_of(s)):
                end = (e + 1) * self.rate - 1
                block = int(tables[s, end // self.block_size])
                self.entries.keys[block, 0, end % self.block_size // self.rate] = entry.to(self.dtype).to(self.device)

    def chosen(self, q_TJI: Tensor, weights_TJ: Tensor, count: int) -> dict[int, list[int]]:
        """Of each row, the entries with the highest scores, in order."""
        found = {}
        for t, s, position in self.places():
            seen, width = (position + 1) // self.rate, q_TJI.shape[2]
            keys = self.entries_of(s)[:seen, -width:].to(self.dtype).double()
            scores = ((q_TJI[t].double().cpu() @ keys.T).relu() * weights_TJ[t].double().cpu().unsqueeze(1)).sum(dim=0)
            found[t] = sorted(scores.topk(min(count, seen)).indices.tolist())
        return found

    def attended(self, q_TNH: Tensor, chosen: dict[int, list[int]] | None = None) -> Tensor:
        """What each row attends to, float64 [rows, N, H]."""
        found, heads = [], self.heads
        assert heads.sinks_N is not None
        for t, s, position in self.places():
            seen = list(range((position + 1) // self.rate)) if chosen is None else chosen[t]
            near = self.keys[s][max(0, position - heads.window + 1) : position + 1]
            far = self.entries_of(s)[seen, : heads.head_dim].to(self.dtype)
            keys = torch.cat((near, far)).double()
            scores = q_TNH[t].double().cpu() @ keys.T * heads.scale
            weights = torch.cat((scores, heads.sinks_N.double().cpu().unsqueeze(1)), dim=1).softmax(dim=1)[:, :-1]
            found.append(weights @ keys)
        return torch.stack(found)

    def places(self) -> list[tuple[int, int, int]]:
        """Of each row that is no padding: its number, its sequence, its position."""
        pairs = [
            (s, p)
            for s, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True))
            for p in range(length - count, length)
        ]
        return [(t, s, p) for t, (s, p) in zip(self.numbers, pairs, strict=True)]


def turned(x_H: Tensor, angles_R: Tensor) -> Tensor:
    """A row whose last numbers are rotated in adjacent pairs, as complex numbers."""
    pairs = torch.view_as_complex(x_H[-2 * len(angles_R) :].reshape(-1, 2).contiguous())
    rotated = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles_R), angles_R)).flatten()
    return torch.cat((x_H[: -2 * len(angles_R)], rotated))
