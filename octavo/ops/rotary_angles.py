"""Cosines and sines of a step's positions, shared by all layers.

Shapes: T tokens, R rotated pairs, A axes.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op_of_ids


@op_of_ids
def rotary_angles(positions_T: Tensor, frequencies_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """``factor`` times the cosine and the sine of position (int64) times frequency (float32); two float32 [T, R]."""
    angles_TR = positions_T.unsqueeze(-1).float() * frequencies_R
    return angles_TR.cos().mul_(factor), angles_TR.sin().mul_(factor)


@op_of_ids
def axis_angles(
    positions_T: Tensor, shifts_AT: Tensor, axes_R: Tensor, frequencies_R: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """As ``rotary_angles``, where a row has a position on each axis (int64): its own plus a shift. ``axes`` (int64) has
    the axis of each pair."""
    of_pair_TR = (positions_T + shifts_AT)[axes_R].T
    angles_TR = of_pair_TR.float() * frequencies_R
    return angles_TR.cos().mul_(factor), angles_TR.sin().mul_(factor)
