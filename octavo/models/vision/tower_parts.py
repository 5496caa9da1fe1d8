"""Parts that vision towers share. A tower runs once for an image, in a few large operations.

Images are computed one by one, so that an image's embeddings never depend on what else is in the batch.

Shapes: N patches, D width of the tower, H head dim, R its pairs, C colours, P side of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from octavo import ops
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import Pixels
from octavo.ops.device_backend import is_gpu

Activation = Callable[[Tensor], Tensor]
LONG = 1024
"""Patches from which on torch's attention is faster than ours on a GPU, though a call takes the host longer: 4,096 of
them with 16 heads of 72 take an H200 212 us, and 258."""


ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}


def part(keys: ConfigKeys, name: str) -> ConfigKeys:
    """The part of a configuration under ``name``. Raises ``CheckpointError``."""
    values = keys.get(name)
    if not isinstance(values, dict):
        raise wrong(name, values, "an object")
    return ConfigKeys(values)


def whole_numbers(keys: ConfigKeys, name: str, default: tuple[int, ...], low: int = 0) -> tuple[int, ...]:
    """A list of whole numbers from ``low``. Raises ``CheckpointError``."""
    values = keys.get(name, default)
    if not isinstance(values, list | tuple) or not all(type(n) is int and low <= n < 2**31 for n in values):
        raise wrong(name, values, f"a list of whole numbers from {low}")
    return tuple(values)


def read_theta(keys: ConfigKeys, default: float) -> float:
    """The base of rotary angles, from ``rope_parameters`` or an older key. Raises ``CheckpointError``."""
    inner = keys.child("rope_parameters") or ConfigKeys({})
    return inner.number("rope_theta", keys.get("rope_theta", default))


def read_ratio(keys: ConfigKeys, name: str, default: float) -> float:
    """A width as a multiple of another. Raises ``CheckpointError``."""
    ratio = keys.number(name, default)
    if ratio > 1024:
        raise wrong(name, ratio, "a number up to 1024")
    return ratio


def read_merge(keys: ConfigKeys, name: str) -> int:
    """Patches in a row of a window that becomes one patch, from its inverse, 0.5 by default. Raises
    ``CheckpointError``."""
    ratio = keys.number(name, 0.5)
    if not 1 / 64 <= ratio <= 1:
        raise wrong(name, ratio, "a number from 1/64 to 1")
    return round(1 / ratio)


class Affine:
    """A linear map of the tower, dense in the format's dtype."""

    def __init__(self, weights: WeightLoader, name: str, size: tuple[int, int], has_bias: bool = True) -> None:
        self.weight = weights.dense(f"{name}.weight", *size)
        self.bias = weights.dense(f"{name}.bias", size[0]) if has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class PatchMap:
    """The map of patches to vectors: a convolution whose places do not overlap."""

    def __init__(self, weights: WeightLoader, name: str, width: int, side: int, has_bias: bool = True) -> None:
        """``side``: of a patch, in pixels."""
        self.side, self.dtype = side, weights.form.dtype
        self.weight = weights.dense(f"{name}.weight", width, 3, side, side).reshape(width, -1)
        self.bias = weights.dense(f"{name}.bias", width) if has_bias else None

    def __call__(self, images: Tensor, merge: int = 1) -> Tensor:
        """Of normalised images [..., Y, X, C] in the order of ``patches``: [..., N, D]."""
        return functional.linear(patches(images, self.side, merge).to(self.dtype), self.weight, self.bias)


class LayerNorm:
    """Normalisation by mean and variance."""

    def __init__(self, weights: WeightLoader, name: str, size: int, eps: float) -> None:
        self.weight, self.bias = weights.dense(f"{name}.weight", size), weights.dense(f"{name}.bias", size)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm:
    """Normalisation by the root of the mean square, with a weight."""

    def __init__(self, weights: WeightLoader, name: str, size: int, eps: float, offset: float = 0.0) -> None:
        self.weight = weights.norm_weight(f"{name}.weight", size, offset)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


def rms_normed(x: Tensor, eps: float) -> Tensor:
    """Normalised by the root of the mean square, computed in float32, without a weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Feedforward:
    """Two maps with an activation between them."""

    def __init__(
        self,
        weights: WeightLoader,
        names: tuple[str, str],
        sizes: tuple[int, int, int],
        activation: Activation,
        has_bias: bool = True,
    ) -> None:
        """``sizes``: inputs, numbers between the maps, outputs."""
        self.up = Affine(weights, names[0], (sizes[1], sizes[0]), has_bias)
        self.down = Affine(weights, names[1], (sizes[2], sizes[1]), has_bias)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class GatedFeedforward:
    """A gate, and the two maps of a feed-forward layer."""

    def __init__(
        self, weights: WeightLoader, prefix: str, sizes: tuple[int, int], activation: Activation, has_bias: bool
    ) -> None:
        """``sizes``: width of the tower and of the layer."""
        D, F = sizes
        self.gate = Affine(weights, f"{prefix}.gate_proj", (F, D), has_bias)
        self.up = Affine(weights, f"{prefix}.up_proj", (F, D), has_bias)
        self.down = Affine(weights, f"{prefix}.down_proj", (D, F), has_bias)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


def attend(q_NAH: Tensor, k_NAH: Tensor, v_NAH: Tensor, scale: float | None = None, ends: Sequence[int] = ()) -> Tensor:
    """Attention of all rows to all rows, for A heads: [..., N, A * H]. Keys and values may have fewer heads.

    With ``ends``, of [N, A, H], rows attend to those up to the same end."""
    *others, N, A, H = q_NAH.shape
    is_plain = not others and not ends and k_NAH.shape[1] == A
    if is_plain and N >= LONG and is_gpu(q_NAH) and q_NAH.element_size() == 2 and H % 8 == 0:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_NAH, k_NAH, v_NAH))
        return functional.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1).reshape(N, A * H)
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q_NAH, k_NAH, v_NAH))
    ends = ends or range(N, len(q) + 1, N)
    return ops.encoder_attention(q, k, v, ends, H**-0.5 if scale is None else scale).view(*others, N, A * H)


def turn(x_NAH: Tensor, cos_NR: Tensor, sin_NR: Tensor) -> Tensor:
    """Rotate each pair of the first and the second half of a head, in float32."""
    return ops.apply_rope(x_NAH, x_NAH[:, :0], cos_NR, sin_NR)[0]


def in_halves(stored: Tensor, num_heads: int) -> Tensor:
    """Rows of queries and keys, whose rotated pairs are stored next to each other, in the order of ``turn``."""
    heads = stored.view(num_heads, -1, 2, *stored.shape[1:])
    return heads.transpose(1, 2).reshape(stored.shape)


def turns(place_N: Tensor, width: int, theta: float = 10_000.0, first: int = 0, every: int = 2) -> Tensor:
    """Angles of the pairs of ``width`` numbers, or of every so many-th from the ``first`` on, [N, pairs]; float32."""
    powers = torch.arange(first, width, every, dtype=torch.float32, device=place_N.device) / width
    return place_N.float()[:, None] / theta**powers


def axial_angles(at: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [N, R], of patches at rows and columns [2, N]: the first half of a head's pairs rotates by the
    row, the other by the column (Qwen2-VL)."""
    angles = torch.cat([turns(place, head_dim // 2) for place in at], dim=-1)
    return angles.cos(), angles.sin()


def merged(x_BND: Tensor, merge: int) -> Tensor:
    """Windows of ``merge`` x ``merge`` patches of square images in one row each: [B, N / merge^2, merge^2 * D]."""
    B, N, D = x_BND.shape
    side = round(N**0.5) // merge
    return x_BND.view(B, side, merge, side, merge, D).transpose(2, 3).reshape(B, side**2, merge**2 * D)


def unpacked(image: Pixels) -> list[Tensor]:
    """The tiles of an image, and last the entire one, which may have another size: uint8 [Y, X, C] each. The details
    are rows and columns of tiles, rows and columns of pixels of a tile, and those of the entire image."""
    rows, columns, tile_rows, tile_columns, height, width = image.details
    flat = image.pixels.reshape(-1, 3)
    size = tile_rows * tile_columns
    tiles = flat[: rows * columns * size].view(rows * columns, tile_rows, tile_columns, 3)
    return [*tiles, flat[rows * columns * size :].view(height, width, 3)]


def normalised(pixels: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """Pixels, uint8 [..., C], as the float32 numbers that towers were trained with."""
    return (pixels.float() / 255 - _constants(tuple(mean), pixels.device)) / _constants(tuple(deviation), pixels.device)


@cache
def _constants(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept on the device: an upload would wait for the step before. Never freed, as captured graphs use it."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def patches(images: Tensor, side: int, merge: int = 1) -> Tensor:
    """The patches of images [..., Y, X, C], row by row, or window by window of ``merge`` x ``merge`` patches:
    [..., N, C * P * P]."""
    *others, Y, X, C = images.shape
    rows, columns = Y // (side * merge), X // (side * merge)
    tiles = images.reshape(-1, rows, merge, side, columns, merge, side, C)
    return tiles.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(*others, -1, C * side * side)


def colours_first(weight: Tensor, side: int) -> Tensor:
    """Weights of a patch's numbers, stored pixel by pixel, in the order of ``patches``."""
    return weight.view(*weight.shape[:-1], side, side, 3).movedim(-1, -3).flatten(-3)


def places(rows: int, columns: int, merge: int, device: torch.device) -> Tensor:
    """Row and column of each patch in the order of ``patches``: int64 [2, N]."""
    row, column = (torch.arange(count, device=device) for count in (rows, columns))
    grid = torch.stack(torch.meshgrid(row, column, indexing="ij"))
    windows = grid.reshape(2, rows // merge, merge, columns // merge, merge)
    return windows.permute(0, 1, 3, 2, 4).reshape(2, -1)
