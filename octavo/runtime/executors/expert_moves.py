"""Moves experts between ranks, in the form in which they are stored.

Shapes: W ranks, M moves, P pieces of an expert, B bytes of a piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import ConfigError
from octavo.layers.expert_parallel import ParallelMixture
from octavo.layers.experts import DenseMixture, GroupedMixture, PackedMixture
from octavo.models.in_place import parts
from octavo.ops.moe import GroupedExperts
from octavo.runtime.replies import Done
from octavo.steps.messages import ExpertLoads, ExpertMove, MoveExperts, ReadExperts, Reply

PIECE_BYTES = 1 << 16
"""Of the rows in which an expert is sent."""


class ExpertMoves:
    """The mixtures of a model of which this rank holds whole experts."""

    def __init__(self, mixtures: Sequence[ParallelMixture]) -> None:
        self.mixtures = mixtures
        for mixture in mixtures:
            mixture.load_X = torch.zeros(len(mixture.placement.slot_X), dtype=torch.int64, device=mixture.device)

    def check(self) -> None:
        """Raise ``ConfigError``, on all ranks alike, if the experts of a mixture differ in more than their numbers."""
        forms = [_forms(mixture) for mixture in self.mixtures]
        digest = zlib.crc32(repr(forms).encode())
        first = self.mixtures[0]
        own = torch.tensor([digest, max(map(len, forms))], device=first.device)
        if any(other != [digest, 1] for other in first.collective.all_gather(own).tolist()):
            raise ConfigError("enable_eplb: the experts of a layer are stored in several forms; leave it out")

    def execute(self, message: ReadExperts | MoveExperts) -> Reply[list[ExpertLoads] | None]:
        """Execute a message; every rank must get the same."""
        with torch.inference_mode():
            if isinstance(message, ReadExperts):
                return Done(self.loads())
            self.move(message.moves)
        return Done(None)

    def loads(self) -> list[ExpertLoads]:
        """See ``ReadExperts``."""
        found = []
        for mixture in self.mixtures:
            num_bytes = sum(part.nbytes for part in slot_numbers(mixture, 0))
            assert mixture.load_X is not None
            found.append(ExpertLoads(mixture.load_X.tolist(), mixture.placement.experts_WP.tolist(), num_bytes))
            mixture.load_X.zero_()
        return found

    def move(self, moves: Sequence[ExpertMove]) -> None:
        """See ``MoveExperts``; every rank must call it with the same moves."""
        for index, those in groupby(sorted(moves, key=lambda move: move.mixture), key=lambda move: move.mixture):
            _move(self.mixtures[index], list(those))


def _move(mixture: ParallelMixture, moves: Sequence[ExpertMove]) -> None:
    """Each rank has places for the pieces of all moves, and gets those of its own."""
    placement, collective, device = mixture.placement, mixture.collective, mixture.device
    num_pieces = -(-sum(part.nbytes for part in slot_numbers(mixture, 0)) // PIECE_BYTES)
    rows = [torch.empty(0, PIECE_BYTES, dtype=torch.uint8, device=device)]
    places = [torch.empty(0, dtype=torch.int64)]
    for i, move in enumerate(moves):
        if placement.rank_XW[move.expert, 0] == collective.rank:
            content = torch.cat([_bytes(part) for part in slot_numbers(mixture, int(placement.slot_X[move.expert]))])
            padding = num_pieces * PIECE_BYTES - len(content)
            rows.append(functional.pad(content, (0, padding)).view(num_pieces, PIECE_BYTES))
            places.append((move.rank * len(moves) + i) * num_pieces + torch.arange(num_pieces))
    num_places = collective.size * len(moves) * num_pieces
    found_PB = collective.all_to_all(torch.cat(rows), torch.cat(places).to(device), num_places)
    for content, move in zip(found_PB.view(len(moves), -1), moves, strict=True):
        if move.rank == collective.rank:
            _write(mixture, move.slot, content)
        placement.experts_WP[move.rank, move.slot] = move.expert
    placement.fill()
    mixture.follow()


def slot_numbers(mixture: ParallelMixture, slot: int) -> list[Tensor]:
    """All numbers of the expert in a slot of this rank, as views of its weights."""
    return [part for part in _slot_parts(mixture, slot) if isinstance(part, Tensor)]


def _slot_parts(mixture: ParallelMixture, slot: int) -> list[Any]:
    own = mixture.own
    if isinstance(own, PackedMixture):
        return list(parts(own.experts[slot]))
    if isinstance(own, GroupedMixture):
        return list(_grouped_parts(own.experts, slot))
    assert isinstance(own, DenseMixture)
    return [part[slot] for part in own.experts if isinstance(part, Tensor)]


def _grouped_parts(experts: GroupedExperts, slot: int) -> Iterator[Any]:
    for packed in (experts.gate_up, experts.down):
        tiles, rows = (size // experts.num_experts for size in (len(packed.words), packed.shape[0]))
        yield from (packed.number, packed.words[slot * tiles : (slot + 1) * tiles])
        for values_GN in (packed.scales_GN, packed.zeros_GN, packed.minima_GN):
            yield None if values_GN is None else values_GN[:, slot * rows : (slot + 1) * rows]
    yield from (None if bias is None else bias[slot] for bias in (experts.gate_up_bias, experts.down_bias))


def _forms(mixture: ParallelMixture) -> set[str]:
    """The forms of this rank's experts: sizes and types of their numbers, and all else that is kept of them."""
    return {
        repr([(part.shape, part.dtype) if isinstance(part, Tensor) else part for part in _slot_parts(mixture, slot)])
        for slot in range(len(mixture.placement.own))
    }


def _write(mixture: ParallelMixture, slot: int, content: Tensor) -> None:
    start = 0
    for part in slot_numbers(mixture, slot):
        part.copy_(content[start : start + part.nbytes].view(part.dtype).view(part.shape))
        start += part.nbytes


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().flatten().view(torch.uint8)
