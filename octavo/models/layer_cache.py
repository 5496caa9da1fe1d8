"""What each layer of a model caches, and the KV groups: layers that share block tables.

A *KV group* is a set of layers that cache the same positions of every sequence, so that they share one block table per
sequence. Full-attention layers form one group; sliding-window layers form one group per window size. Layers of a group
may differ in KV heads and head dimension; their blocks then differ in bytes.

Recurrent state would be a further ``kind`` with a group of its own. Its size does not depend on the number of tokens,
so its table would hold states (the current one, and those kept at block boundaries for the prefix cache), and only its
group cache would have to know. No supported family needs it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

Kind = Literal["attention", "latent"]
"""Keys and values, or latents: one tensor, whose values are part of the keys."""


@dataclass(frozen=True)
class LayerCacheSpec:
    """What one layer caches for each position."""

    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in positions, including the row's own; 0: full attention."""
    kind: Kind = "attention"
    shared_with: int | None = None
    """The earlier layer whose cache this layer reads instead of its own; it must have the same shape and window."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors ``[num_kv_heads, head_dim]`` per position."""
        return 2 if self.kind == "attention" else 1

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one position takes in this layer."""
        if self.shared_with is not None:
            return 0
        return self.num_tensors * self.num_kv_heads * self.head_dim * dtype.itemsize


def rank_cache(specs: Sequence[LayerCacheSpec], size: int) -> tuple[LayerCacheSpec, ...]:
    """What each of ``size`` ranks caches: its KV heads, which several ranks hold where there are fewer; all latents."""
    return tuple(replace(spec, num_kv_heads=max(1, spec.num_kv_heads // size)) for spec in specs)


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table per sequence."""

    layers: tuple[int, ...]
    window: int
    """Blocks with only positions further back than this are freed; 0: never."""

    def bytes_per_token(self, specs: Sequence[LayerCacheSpec], dtype: torch.dtype) -> int:
        """Bytes that one position takes in all layers of the group."""
        return sum(specs[layer].bytes_per_token(dtype) for layer in self.layers)


def kv_groups(specs: Sequence[LayerCacheSpec], max_window: int = 0) -> list[KVGroup]:
    """Divide the layers of a model into KV groups. The first group has full attention or else the widest window.

    Layers with a window of ``max_window`` positions or more join the first group, because such a window saves no
    memory. With ``max_window`` 0, all layers form one group.
    """
    windows = {spec.window for spec in specs}
    narrow = sorted((window for window in windows if 0 < window < max_window), reverse=True)
    wide = windows.difference(narrow) or {narrow.pop(0)}
    first = 0 if 0 in wide else max(wide)
    groups = []
    for window in (first, *narrow):
        layers = tuple(i for i, spec in enumerate(specs) if (spec.window if spec.window in narrow else first) == window)
        groups.append(KVGroup(layers, window))
    for index, spec in enumerate(specs):
        _check_shared(specs, index, spec)
    return groups


def _check_shared(specs: Sequence[LayerCacheSpec], index: int, spec: LayerCacheSpec) -> None:
    if spec.shared_with is None:
        return
    own = (spec.num_kv_heads, spec.head_dim, spec.window, spec.kind)
    source = specs[spec.shared_with]
    assert spec.shared_with < index, f"layer {index} reads the cache of a later layer"
    assert source.shared_with is None, f"layer {index} reads the cache of a layer without one"
    assert own == (source.num_kv_heads, source.head_dim, source.window, source.kind), f"layer {index} has another shape"
