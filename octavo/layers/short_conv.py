"""The short convolution with input and output gates of LFM2 (Liquid AI, 2025).

Shapes: T tokens, D model, W width.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.attention import LayerCache, PagedRows


class ShortConv:
    """``c * conv(b * x)``, where ``b, c, x`` are the columns of ``projections(norm(x))``."""

    def __init__(self, norm: RMSNorm, projections: Linear, conv_WD: Tensor, bias_D: Tensor | None) -> None:
        self.norm = norm
        self.projections = projections
        self.conv_WD = conv_WD
        self.bias_D = bias_D

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor of x's shape, or with this rank's columns."""
        bcx_T3D = self.projections(x_TD, norm=self.norm)
        (state,) = cache.states
        return ops.gated_conv(bcx_T3D, self.conv_WD, self.bias_D, state, rows.states)
