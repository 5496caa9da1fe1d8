"""Moves experts between ranks, in the form in which they are stored.

Shapes: W ranks, P slots of a rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.layers.expert_parallel import ParallelMixture
from octavo.layers.experts import DenseMixture, GroupedMixture, PackedMixture
from octavo.models.in_place import parts
from octavo.ops.moe import GroupedExperts
from octavo.runtime.replies import Done
from octavo.steps.messages import ExpertLoads, ExpertMove, MoveExperts, ReadExperts, Reply

PIECE_BYTES = 1 << 22
"""Of an expert that is sent: each rank has a piece of all ranks at a time, and an expert of its own for each move."""


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
    """Each rank gets the numbers of its own moves before any are written, as experts may change places."""
    placement, rank = mixture.placement, mixture.collective.rank
    received = []
    for move in moves:
        source = int(placement.rank_XW[move.expert, 0])
        slot = int(placement.slot_X[move.expert]) if source == rank else 0
        content = torch.cat([_bytes(part) for part in slot_numbers(mixture, slot)])
        for piece in torch.split(content, PIECE_BYTES):
            piece.copy_(mixture.collective.all_gather(piece)[source])
        if move.rank == rank:
            received.append((move.slot, content))
    for slot, content in received:
        _write(mixture, slot, content)
    for move in moves:
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
    return [part[slot] for part in vars(own.experts).values() if isinstance(part, Tensor)]


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
