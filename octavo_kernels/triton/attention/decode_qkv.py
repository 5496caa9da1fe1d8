"""A row's own query, key and value: loaded from its projections, normed and rotated in a kernel's registers.

Shapes: H head dim, R rotated pairs, D: H filled up to a power of two with zeros. ``d`` is the place in a head: [D] for
one head, or [N, D] for N of them, so that what all share is loaded to where each needs it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_norm(weight: tl.tensor, d: tl.tensor, H: tl.constexpr, R: tl.constexpr) -> tl.tensor:
    """A norm's weights for the elements of heads, and for those that they are turned with; 1 without a norm."""
    if weight is None:
        own, other = 1.0, 1.0
    else:
        own = tl.load(weight + d, mask=d < H, other=0.0).to(tl.float32)
        other = tl.load(weight + _other(d, R), mask=d < 2 * R, other=0.0).to(tl.float32)
    return own, other


@triton.jit
def load_scales(k_scales: tl.tensor, v_scales: tl.tensor, kv_head: tl.tensor) -> tl.tensor:
    """What the keys and values in the cache of a kv head are to be multiplied by."""
    k_scale, v_scale = 1.0, 1.0
    if k_scales is not None:
        k_scale, v_scale = tl.load(k_scales + kv_head), tl.load(v_scales + kv_head)
    return k_scale, v_scale


@triton.jit
def divided(x: tl.tensor, scales: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Keys or values as their cache holds them: divided by ``scale``, if there are ``scales``."""
    if scales is not None:
        x = x.to(tl.float32) * (1 / scale)
    return x


@triton.jit
def load_heads(start: tl.tensor, is_head: tl.tensor, d: tl.tensor, H: tl.constexpr, R: tl.constexpr) -> tl.tensor:
    """The heads that begin at ``start``, and the elements that theirs are turned with, in float32."""
    own = tl.load(start + d, mask=is_head & (d < H), other=0.0).to(tl.float32)
    other = own
    if R > 0:
        other = tl.load(start + _other(d, R), mask=is_head & (d < 2 * R), other=0.0).to(tl.float32)
    return own, other


@triton.jit
def load_angles(
    cos: tl.tensor, sin: tl.tensor, start: tl.tensor, is_row: tl.tensor, d: tl.tensor, R: tl.constexpr
) -> tl.tensor:
    """Cosines and signed sines of the row that begins at ``start``."""
    cosine, sine = 1.0, 0.0
    if R > 0:
        at = start + tl.where(d < R, d, d - R)
        cosine = tl.load(cos + at, mask=is_row & (d < 2 * R), other=1.0)
        sine = tl.load(sin + at, mask=is_row & (d < 2 * R), other=0.0)
        sine = tl.where(d < R, -sine, sine)
    return cosine, sine


@triton.jit
def turned(
    head: tl.tensor, norm: tl.tensor, weights: tl.tensor, angles: tl.tensor, eps: tl.tensor, H: tl.constexpr,
    AXIS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The result of ``load_heads``, normed along its last axis and rotated."""
    own, other = head
    if norm is not None:
        factor = tl.rsqrt(tl.sum(own * own, AXIS, keep_dims=True) / H + eps)
        own, other = own * factor * weights[0], other * factor * weights[1]
    return own * angles[0] + other * angles[1]


@triton.jit
def _other(d: tl.tensor, R: tl.constexpr) -> tl.tensor:
    return tl.where(d < R, d + R, d - R)
