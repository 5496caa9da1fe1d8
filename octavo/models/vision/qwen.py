"""The vision towers of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL (arXiv 2511.21631).

All take images of any size in patches, four of which make an embedding. Rows and columns rotate queries and keys. Most
layers of Qwen2.5-VL attend within windows; Qwen3-VL adds learned positions, and gives outputs of some of its layers to
the first layers of the decoder (deepstack).

Shapes: N patches, D width of the tower, R rotated pairs of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import Pixels, VisionConfig, read_axes
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Activation,
    Affine,
    Feedforward,
    GatedFeedforward,
    LayerNorm,
    RMSNorm,
    attend,
    axial_angles,
    normalised,
    part,
    patches,
    places,
    turn,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True)
class QwenConfig(VisionConfig):
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    patch: int
    frames: int = 1
    """Frames of a video that a patch spans; an image counts as so many equal ones."""
    merge: int = 1
    activation: Activation
    is_gated: bool = False
    """Whether layers have RMSNorms and gates, as decoders do, and not LayerNorms and two maps."""
    ups: tuple[str, str] = ("linear_fc1", "linear_fc2")
    """Names of the maps of layers without gates."""
    eps: float = 1e-6
    merger_size: int = 0
    """Width of the feed-forward layer behind the layers, where the other sizes do not give it."""
    has_bias: bool = True
    has_qkv_bias: bool = True
    num_kv_heads: int = 0
    """Of keys and values; 0: as many as of queries."""
    is_split: bool = False
    """Whether checkpoints have a map each for queries, keys and values."""
    norms_heads: bool = False
    """Whether queries and keys are normalised."""
    window: int = 0
    """Side of an attention window in patches."""
    full_layers: tuple[int, ...] = ()
    """Layers that attend to the entire image, in a tower with windows."""
    num_places: int = 0
    """Learned positions, in a square grid."""
    deep_layers: tuple[int, ...] = ()
    """Layers whose outputs the decoder gets as well."""


def read_qwen(keys: ConfigKeys, inner: ConfigKeys, activation: str, patch: int = 14, **fields: Any) -> QwenConfig:
    """Read the keys that all these towers have, with the family's default for two of them; ``fields`` are the others,
    and what a family has in their place."""
    if "axes" not in fields:
        fields["axes"] = read_axes(part(keys, "text_config") if keys.get("text_config") else keys)
    if "width" not in fields:
        fields |= {"width": inner.size("hidden_size"), "hidden_size": inner.size("out_hidden_size")}
        fields.setdefault("ffn_size", inner.size("intermediate_size"))
    return QwenConfig(
        merge=inner.size("spatial_merge_size", 2),
        depth=inner.size("depth"),
        num_heads=inner.size("num_heads"),
        frames=inner.size("temporal_patch_size", 2),
        patch=inner.size("patch_size", patch),
        activation=inner.choice("hidden_act", ACTIVATIONS, activation),
        **fields,
    )


class QwenTower:
    """What the towers have in common."""

    has_patch_bias = False

    def __init__(self, config: QwenConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, P = config.width, config.patch
        kernel = weights.dense("visual.patch_embed.proj.weight", D, 3, config.frames, P, P)
        self.patch_map = kernel.transpose(1, 2).reshape(D, -1)
        self.patch_bias = weights.dense("visual.patch_embed.proj.bias", D) if self.has_patch_bias else None
        self.blocks = [QwenBlock(config, weights, f"visual.blocks.{i}") for i in range(config.depth)]

    def embedded(self, image: Pixels) -> tuple[Tensor, int, int]:
        """Patches in the order of windows, [N, D], and their rows and columns."""
        config = self.config
        tiles = normalised(image.pixels, image.mean, image.deviation)
        rows, columns = tiles.shape[1] // config.patch, tiles.shape[2] // config.patch
        frames = list(patches(tiles, config.patch, config.merge))
        flat = torch.cat(frames * (config.frames // len(frames)), dim=-1).to(self.form.dtype)
        return torch.nn.functional.linear(flat, self.patch_map, self.patch_bias), rows, columns

    def angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches, [N, R]."""
        at = places(rows, columns, self.config.merge, self.form.device)
        return axial_angles(at, self.config.width // self.config.num_heads)


def norm_of(config: QwenConfig) -> type[RMSNorm] | type[LayerNorm]:
    """The kind of a tower's norms."""
    return RMSNorm if config.is_gated else LayerNorm


class QwenBlock:
    """Attention and feed-forward layer."""

    def __init__(self, config: QwenConfig, weights: WeightLoader, prefix: str) -> None:
        D = config.width
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads or config.num_heads
        H, ends = D // config.num_heads, "qk" if config.norms_heads else ""
        size = (self.num_heads + 2 * self.num_kv_heads) * H
        if config.is_split:
            parts = [Affine(weights, f"{prefix}.attn.{end}", (D, D), config.has_qkv_bias) for end in "qkv"]
            self.qkv, biases = parts[0], [each.bias for each in parts if each.bias is not None]
            self.qkv.weight = torch.cat([each.weight for each in parts])
            self.qkv.bias = torch.cat(biases) if biases else None
        else:
            self.qkv = Affine(weights, f"{prefix}.attn.qkv", (size, D), config.has_qkv_bias)
        self.proj = Affine(weights, f"{prefix}.attn.proj", (D, D), config.has_bias)
        self.head_norms = [RMSNorm(weights, f"{prefix}.attn.{end}_norm", H, config.eps) for end in ends]
        self.norms = [norm_of(config)(weights, f"{prefix}.norm{i}", D, config.eps) for i in (1, 2)]
        self.mlp: Feedforward | GatedFeedforward
        if config.is_gated:
            sizes = D, config.ffn_size
            self.mlp = GatedFeedforward(weights, f"{prefix}.mlp", sizes, config.activation, config.has_bias)
        else:
            first, second = (f"{prefix}.mlp.{name}" for name in config.ups)
            self.mlp = Feedforward(weights, (first, second), (D, config.ffn_size, D), config.activation)

    def __call__(self, x_ND: Tensor, angles: tuple[Tensor, Tensor] | None, ends: Sequence[int] = ()) -> Tensor:
        """``angles``: cosines and sines [N, R]; ``ends``: of the windows in which patches attend to each other; all do
        if it is empty."""
        N, A, K = len(x_ND), self.num_heads, self.num_kv_heads
        qk, v = self.qkv(self.norms[0](x_ND)).view(N, A + 2 * K, -1).split_with_sizes([A + K, K], dim=1)
        if self.head_norms:
            qk = torch.cat(
                [norm(x) for norm, x in zip(self.head_norms, qk.split_with_sizes([A, K], dim=1), strict=True)], dim=1
            )
        q, k = (qk if angles is None else turn(qk, *angles)).split_with_sizes([A, K], dim=1)
        x_ND = x_ND + self.proj(attend(q, k, v, ends=ends))
        return x_ND + self.mlp(self.norms[1](x_ND))


def read_windowed(keys: ConfigKeys, **fields: Any) -> QwenConfig:
    """Read the configuration of a tower with windows."""
    inner = part(keys, "vision_config")
    return read_qwen(
        keys,
        inner,
        "silu",
        is_gated=True,
        window=inner.size("window_size", 112) // inner.size("patch_size", 14),
        full_layers=whole_numbers(inner, "fullatt_block_indexes", (7, 15, 23, 31)),
        **fields,
    )


def windows(
    rows: int, columns: int, config: QwenConfig, device: torch.device
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The order of patches window by window, the way back, and the end of each window."""
    side = config.window // config.merge * config.merge
    order = torch.argsort(_window_of_patch(rows, columns, side, config.merge, device), stable=True)
    return order, torch.argsort(order), _ends(rows, columns, side, config.merge)


def _window_of_patch(rows: int, columns: int, side: int, merge: int, device: torch.device) -> Tensor:
    window_2N: Tensor = places(rows, columns, merge, device) // side
    return window_2N[0] * -(-columns // side) + window_2N[1]


@lru_cache(maxsize=64)
def _ends(rows: int, columns: int, side: int, merge: int) -> tuple[int, ...]:
    """The end of each window, counted on the host: a GPU would be waited for."""
    counts = torch.bincount(_window_of_patch(rows, columns, side, merge, torch.device("cpu")))
    return tuple(counts[counts > 0].cumsum(0).tolist())


class Qwen25Tower(QwenTower):
    """The tower of Qwen2.5-VL."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        return read_windowed(keys)

    def __init__(self, config: QwenConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        D, inner = config.width, config.width * config.merge**2
        self.norm = norm_of(config)(weights, "visual.merger.ln_q", D, config.eps)
        names = "visual.merger.mlp.0", "visual.merger.mlp.2"
        self.merger = Feedforward(weights, names, (inner, inner, config.hidden_size), ACTIVATIONS["gelu"])

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row: [N / merge^2, D of the decoder]."""
        x_ND, rows, columns = self.embedded(image)
        cos_NR, sin_NR = self.angles(rows, columns)
        ends: Sequence[int] = ()
        if self.config.window:
            order, back, ends = windows(rows, columns, self.config, self.form.device)
            x_ND, cos_NR, sin_NR = x_ND[order], cos_NR[order], sin_NR[order]
        for index, block in enumerate(self.blocks):
            x_ND = block(x_ND, (cos_NR, sin_NR), () if index in self.config.full_layers else ends)
        if self.config.window:
            x_ND = x_ND[back]
        return self.merger(self.norm(x_ND).view(len(x_ND) // self.config.merge**2, -1))


class Qwen25OmniTower(Qwen25Tower):
    """The tower of Qwen2.5-Omni (arXiv 2503.20215)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        return read_windowed(keys, is_split=True)

    own_names: ClassVar = {"thinker.": ""}


class ExaoneTower(Qwen25Tower):
    """The tower of EXAONE 4.5, with fewer heads of keys and values, for a decoder without axes of positions."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        inner = part(keys, "vision_config")
        heads, kv_heads = inner.size("num_heads"), inner.size("num_key_value_heads", 8)
        if heads % kv_heads:
            raise wrong("vision_config.num_key_value_heads", kv_heads, f"a divisor of {heads}, the heads of queries")
        return read_windowed(keys, axes=(), num_kv_heads=kv_heads)


class Qwen2Tower(Qwen25Tower):
    """The tower of Qwen2-VL, without windows."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        inner = part(keys, "vision_config")
        width = inner.size("embed_dim", 1280)
        return read_qwen(
            keys,
            inner,
            "quick_gelu",
            width=width,
            hidden_size=inner.size("hidden_size"),
            ffn_size=width * inner.size("mlp_ratio", 4),
            ups=("fc1", "fc2"),
        )


class Qwen3Merger:
    """Makes an embedding of four patches."""

    def __init__(self, config: QwenConfig, weights: WeightLoader, prefix: str, norms_merged: bool) -> None:
        inner = config.width * config.merge**2
        self.inner, self.norms_merged = inner, norms_merged
        self.norm = LayerNorm(weights, f"{prefix}.norm", inner if norms_merged else config.width, 1e-6)
        names = f"{prefix}.linear_fc1", f"{prefix}.linear_fc2"
        self.mlp = Feedforward(weights, names, (inner, inner, config.hidden_size), ACTIVATIONS["gelu"])

    def __call__(self, x_ND: Tensor) -> Tensor:
        merged = x_ND.reshape(-1, self.inner)
        return self.mlp(self.norm(merged) if self.norms_merged else self.norm(x_ND).reshape(-1, self.inner))


class Qwen3Tower(QwenTower):
    """The tower of Qwen3-VL, and of Qwen3.5 without deepstack."""

    has_patch_bias = True

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        inner = part(keys, "vision_config")
        deep = whole_numbers(inner, "deepstack_visual_indexes", ())
        return read_qwen(
            keys,
            inner,
            "gelu_pytorch_tanh",
            16,
            num_places=inner.size("num_position_embeddings", 2304),
            deep_layers=deep,
            num_deep=len(deep),
        )

    def __init__(self, config: QwenConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.place_table = weights.dense("visual.pos_embed.weight", config.num_places, config.width)
        self.merger = Qwen3Merger(config, weights, "visual.merger", norms_merged=False)
        self.deep_mergers = [
            Qwen3Merger(config, weights, f"visual.deepstack_merger_list.{i}", norms_merged=True)
            for i in range(len(config.deep_layers))
        ]

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row, each followed by what layers of the decoder add."""
        x_ND, rows, columns = self.embedded(image)
        x_ND = x_ND + self.learned(rows, columns).to(x_ND.dtype)
        angles, deep = self.angles(rows, columns), []
        for index, block in enumerate(self.blocks):
            x_ND = block(x_ND, angles)
            if index in self.config.deep_layers:
                deep.append(self.deep_mergers[self.config.deep_layers.index(index)](x_ND))
        return torch.cat([self.merger(x_ND), *deep], dim=-1)

    def learned(self, rows: int, columns: int) -> Tensor:
        """The learned positions of a grid of other sides, interpolated linearly between corners: [N, D]."""
        side, device = round(self.config.num_places**0.5), self.form.device
        at = places(rows, columns, self.config.merge, device)
        found = torch.zeros(at.shape[1], self.config.width, dtype=torch.float32, device=device)
        ends = []
        for place, count in zip(at, (rows, columns), strict=True):
            exact = torch.linspace(0, side - 1, count, device=device)[place]
            low = exact.long()
            ends.append(((low, 1 - (exact - low)), ((low + 1).clamp(max=side - 1), exact - low)))
        for row, row_share in ends[0]:
            for column, column_share in ends[1]:
                weight = (row_share * column_share)[:, None]
                found += self.place_table[row * side + column].float() * weight
        return found


class CompassTower(Qwen3Tower):
    """The tower of North Micro Vision: Qwen3-VL's, for a decoder whose kinds of layers may have rotary keys of their
    own."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        given = part(keys, "text_config").get("rope_parameters", {})
        if not isinstance(given, Mapping):
            raise wrong("rope_parameters", given, "an object")
        of_kinds = [own for own in given.values() if isinstance(own, Mapping)] or [given]
        sections = [own.get("mrope_section", [24, 20, 20]) for own in of_kinds]
        if any(own != sections[0] for own in sections):
            raise wrong("mrope_section", sections, "the same for all kinds of layers")
        text = {"rope_parameters": {"mrope_section": sections[0], "mrope_interleaved": True}}
        return super().read_config(keys.over({**keys.values, "text_config": text}))


class Qwen3OmniTower(Qwen3Tower):
    """The tower of Qwen3-Omni (arXiv 2509.17765), the same with other names."""

    own_names: ClassVar = {
        "thinker.": "",
        ".merger_list.": ".deepstack_merger_list.",
        ".ln_q.": ".norm.",
        ".mlp.0.": ".linear_fc1.",
        ".mlp.2.": ".linear_fc2.",
    }
