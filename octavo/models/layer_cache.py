"""What each layer of a model caches, and the KV groups: layers that share block tables.

A *KV group* is a set of layers that cache the same positions of every sequence, so that they share one block table per
sequence. Full-attention layers form one group; sliding-window layers form one group per window size. Layers of a group
may differ in KV heads and head dimension; their blocks then differ in bytes.

Recurrent layers keep a fixed number of numbers for each sequence: its state. One slot holds the states of all layers.
Those of the kind "state" cache no positions and are in no group; others have a state beside what they cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from octavo.errors import ConfigError
from octavo.model_info import RoutesInfo
from octavo.ops.attention.cached_rows import row_bytes

Kind = Literal["attention", "latent", "state"]
"""Keys and values; or latents: one tensor, whose values are part of the keys; or a recurrent state."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a layer's recurrent state."""

    shape: tuple[int, ...]
    """That of one sequence."""
    divided: int
    """The axis of heads or channels, which ranks divide."""
    num_units: int
    """Heads, or groups of them, that no rank may have a part of; 0: every rank has all of the tensor."""
    is_recurrent: bool
    """Whether it sums over all positions, and so is kept in float32; otherwise it holds inputs of the model's dtype."""

    def of_rank(self, size: int) -> StateTensor:
        """The part that each of ``size`` ranks has."""
        if not self.num_units:
            return self
        shape = list(self.shape)
        shape[self.divided] //= size
        return replace(self, shape=tuple(shape))


def conv_state(width: int, channels: int, num_units: int) -> StateTensor:
    """The last inputs of a convolution of ``width``: [width - 1, channels]."""
    return StateTensor((width - 1, channels), 1, num_units, is_recurrent=False)


def recurrent_state(heads: int, key_dim: int, value_dim: int, num_units: int) -> StateTensor:
    """The state of a recurrence: [heads, key_dim, value_dim]."""
    return StateTensor((heads, key_dim, value_dim), 0, num_units, is_recurrent=True)


@dataclass(frozen=True)
class LayerCacheSpec:
    """What one layer caches for each position, or for each sequence."""

    num_kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    """Sliding window in positions, including the row's own; 0: full attention."""
    kind: Kind = "attention"
    shared_with: int | None = None
    """The earlier layer whose cache this layer reads instead of its own; it must have the same shape and window."""

    state: tuple[StateTensor, ...] = ()
    """The tensors of a recurrent state, which layers of any kind may have."""
    routes: RoutesInfo | None = None
    """The experts that the routers of all layers select at each position, if this layer's blocks have them."""
    index_dim: int = 0
    """Width of the key of an indexer that is cached besides; 0: none."""
    beside: int | None = None
    """The layer that caches this besides its own: such entries are behind those of all layers."""
    rate: int = 1
    """Positions of which there is one entry, in the block of the last of them."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors ``[num_kv_heads, head_dim]`` per position."""
        return {"attention": 2, "latent": 1, "state": 0}[self.kind]

    def num_slots(self, block_size: int) -> int:
        """Entries of a block of so many positions: where groups end in it, however it lies."""
        return -(-block_size // self.rate)

    def bytes_per_block(self, dtype: torch.dtype, block_size: int) -> int:
        """Bytes that a block of so many positions takes in this layer."""
        if self.shared_with is not None:
            return 0
        num_bytes = self.num_tensors * self.num_kv_heads * row_bytes(dtype, self.head_dim) * self.num_slots(block_size)
        num_bytes += row_bytes(dtype, self.index_dim) * block_size if self.index_dim else 0
        return num_bytes if self.routes is None else num_bytes + self.routes.num_bytes * block_size


@dataclass(frozen=True)
class PipelineStage:
    """One of the parts, one behind the other, into which ranks divide the layers of a model."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.count - 1

    def layers(self, num_layers: int) -> range:
        """The layers of this part; the last parts have one more if the number does not divide evenly."""
        return range(self.number * num_layers // self.count, (self.number + 1) * num_layers // self.count)


ONE_STAGE = PipelineStage()


def state_layer(*tensors: StateTensor) -> LayerCacheSpec:
    """A layer that keeps a recurrent state of these tensors."""
    return LayerCacheSpec(kind="state", state=tensors)


def state_bytes(specs: Sequence[LayerCacheSpec], dtype: torch.dtype, state_dtype: torch.dtype) -> int:
    """Bytes of a sequence's state in all layers, with inputs of ``dtype`` and recurrent tensors of ``state_dtype``."""
    tensors = [tensor for spec in specs for tensor in spec.state]
    sizes = [(math.prod(tensor.shape), state_dtype if tensor.is_recurrent else dtype) for tensor in tensors]
    return sum(count * of.itemsize for count, of in sizes)


def rank_cache(specs: Sequence[LayerCacheSpec], size: int) -> tuple[LayerCacheSpec, ...]:
    """What each of ``size`` ranks caches: its KV heads, which several ranks hold where there are fewer; all latents;
    its part of recurrent states."""
    return tuple(
        replace(
            spec,
            num_kv_heads=0 if spec.kind == "state" else max(1, spec.num_kv_heads // size),
            state=tuple(tensor.of_rank(size) for tensor in spec.state),
        )
        for spec in specs
    )


def stage_caches(specs: Sequence[LayerCacheSpec], count: int) -> list[list[LayerCacheSpec]]:
    """What each of ``count`` stages caches of all layers: nothing of those of others."""
    owns = [PipelineStage(number, count).layers(len(specs)) for number in range(count)]
    return [[spec if i in own else LayerCacheSpec(kind="state") for i, spec in enumerate(specs)] for own in owns]


def own_cache(specs: Sequence[LayerCacheSpec], own: range) -> tuple[LayerCacheSpec, ...]:
    """What the layers of a stage cache, which share nothing with those of others."""
    parts = specs[own.start : own.stop]
    shared = (None if spec.shared_with is None else spec.shared_with - own.start for spec in parts)
    return tuple(replace(spec, shared_with=source) for spec, source in zip(parts, shared, strict=True))


def with_routes(specs: Sequence[LayerCacheSpec], routes: RoutesInfo | None) -> tuple[LayerCacheSpec, ...]:
    """The same with what routers select beside the keys of a layer whose blocks no window gives up.

    Raises ``ConfigError`` if there is none.
    """
    if routes is None:
        return tuple(specs)
    has_states = any(spec.kind == "state" or spec.state for spec in specs)
    for i, spec in enumerate(specs):
        if spec.kind != "state" and spec.shared_with is None and (has_states or not spec.window):
            return (*specs[:i], replace(spec, routes=routes), *specs[i + 1 :])
    raise ConfigError("enable_return_routed_experts: needs a model with a layer of full attention")


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one block table per sequence."""

    layers: tuple[int, ...]
    window: int
    """Blocks with only positions further back than this are freed; 0: never."""

    def within(self, own: range) -> KVGroup:
        """Those of these layers, counted from the first of them."""
        return replace(self, layers=tuple(layer - own.start for layer in self.layers if layer in own))

    def bytes_per_block(self, specs: Sequence[LayerCacheSpec], dtype: torch.dtype, block_size: int) -> int:
        """Bytes that a block of so many positions takes in all layers of the group."""
        return sum(specs[layer].bytes_per_block(dtype, block_size) for layer in self.layers)


def kv_groups(specs: Sequence[LayerCacheSpec], max_window: int = 0) -> list[KVGroup]:
    """Divide the layers of a model into KV groups. The first group has full attention or else the widest window.

    Layers with a window of ``max_window`` positions or more join the first group, because such a window saves no
    memory. With ``max_window`` 0, or where there are layers with recurrent state, all layers but those form one group:
    where a state is lost, positions behind the window are computed again.
    """
    if any(spec.kind == "state" or spec.state for spec in specs):
        layers = tuple(i for i, spec in enumerate(specs) if spec.kind != "state")
        return [KVGroup(layers, 0)]
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
