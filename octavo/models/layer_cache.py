"""What the layers of a model cache, and which of them share block tables.

A *KV group* is a set of layers that cache the same positions of every sequence, so one block table of a sequence serves
all of them. Layers of full attention are one group; layers with a sliding window are another for each width of window.
Layers of a group may differ in heads and widths: a block then takes another number of bytes in each.

Recurrent state has its place here too: a further ``kind``, whose layers are a group of their own. What such a group
caches does not grow with the tokens, so its table is of states (the current one, and those kept at block boundaries
for the prefix cache), and its group cache is the only part that has to know. No family needs it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["attention", "latent"]
"""Keys and values, or latents: one tensor whose values are a part of the keys."""


@dataclass(frozen=True)
class LayerCacheSpec:
    """What one layer caches of every position."""

    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Positions up to its own that a row attends to; 0: all (full attention)."""
    kind: Kind = "attention"
    shared_with: int | None = None
    """The earlier layer whose cache this one reads, in place of one of its own. It has the same shape and window."""

    @property
    def num_tensors(self) -> int:
        """Tensors of ``[num_kv_heads, head_dim]`` for each position."""
        return 2 if self.kind == "attention" else 1

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one position takes in this layer."""
        if self.shared_with is not None:
            return 0
        return self.num_tensors * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table of each sequence."""

    layers: tuple[int, ...]
    window: int
    """Blocks of positions further back than this are given back; 0: never."""

    def bytes_per_token(self, specs: Sequence[LayerCacheSpec], dtype: torch.dtype) -> int:
        """Bytes that one position takes in all layers of the group."""
        return sum(specs[layer].bytes_per_token(dtype) for layer in self.layers)


def kv_groups(specs: Sequence[LayerCacheSpec], max_window: int = 0) -> list[KVGroup]:
    """Divide the layers of a model into KV groups. The first reaches furthest back.

    A window of ``max_window`` positions or more saves no memory. Its layers join the first group: that of full
    attention, or of the widest window where no layer has full attention. With 0, all layers are one group.
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
    assert source.shared_with is None, f"layer {index} reads the cache of a layer that has none"
    assert own == (source.num_kv_heads, source.head_dim, source.window, source.kind), f"layer {index} has another shape"
