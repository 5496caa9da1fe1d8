"""Cosines and sines of a step's positions, shared by all layers.

Shapes: T tokens, R rotated pairs.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op_of_ids


@op_of_ids
def rotary_angles(positions_T: Tensor, frequencies_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """``factor`` times the cosine and the sine of position (int64) times frequency (float32); two float32 [T, R]."""
    angles_TR = positions_T.unsqueeze(-1).float() * frequencies_R
    return angles_TR.cos().mul_(factor), angles_TR.sin().mul_(factor)
