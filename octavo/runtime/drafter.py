"""Speculative decoding on the executing side: models that draft the next tokens on the device, after each step.

Shapes: T rows, S sequences, D model, K drafts of a sequence, B entries of a block table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.ops.attention import GroupRows, PagedRows
from octavo.ops.sample import SampleParams


class DraftInputs(NamedTuple):
    """What a drafter gets after a step has been sampled. Rows and sequences of padding are included."""

    token_ids_T: Tensor
    """int64"""
    positions_T: Tensor
    """int64"""
    next_tokens_T: Tensor
    """int64: the token behind each row: that of the next row, or the sampled one. Behind a rejected draft it is any."""
    hidden: Mapping[int, Tensor]
    """For each of the drafter's ``layers`` the residual stream [T, D] that enters it; the number of layers stands for
    the last layer's output, before the final norm."""
    rows: PagedRows
    """The step's sequences, and their block tables in every KV group."""
    last_rows_S: Tensor
    """int64: the row behind which the newest token of each sequence was sampled."""
    tokens_S: Tensor
    """int64: that newest token, or 0 if it could not be sampled."""
    params_S: SampleParams
    """Sampling parameters of each sequence; ``position`` is that of its newest token, so draft i has position + 1 + i.

    A drafter that samples must call ``ops.sample`` with these: the target then draws with the same noise, so that
    drafts are accepted as often as the two distributions allow, whatever the temperature.
    """
    batch_indices_S: Tensor
    """int64"""


class Drafter(Protocol):
    """A model that drafts. It never synchronises with the host, and may be captured in a CUDA graph."""

    num_drafts: int
    """Drafts K of each sequence and step."""
    layers: tuple[int, ...]
    """Layers whose inputs it needs; see ``DraftInputs.hidden``."""

    def __call__(self, inputs: DraftInputs) -> Tensor:
        """Drafts, int32 [S, K]: tokens for the positions behind each sequence's newest token."""
        ...


def slots_of(group: GroupRows, positions_S: Tensor, block_size: int) -> Tensor:
    """The slots, int64 [S], of one position of each sequence in a KV group; positions must have a block."""
    blocks_S = group.block_tables_SB.gather(1, (positions_S // block_size).unsqueeze(1)).squeeze(1)
    return blocks_S.to(torch.int64) * block_size + positions_S % block_size
