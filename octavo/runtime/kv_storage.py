"""The tensors that hold keys and values, and recurrent states. The owners of blocks and slots are tracked in
``octavo.cache``, not here.

Shapes: L layers, P tensors of a layer (2: keys and values; 1: latents), N blocks, K kv heads, S slots of a block, or
as many as it has entries of several positions, H head dim, or the length of a row of ``ops.attention.cached_rows``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.models.layer_cache import KVGroup, LayerCacheSpec, StateTensor
from octavo.ops.attention.attention import KVScales, LayerCache
from octavo.ops.attention.cached_rows import STORED, row_length
from octavo.ops.collective import Collective, ContextRanks


class StatePool(NamedTuple):
    """Size and types of the pool of recurrent states."""

    num_slots: int = 1
    dtype: torch.dtype = torch.float32
    """The model's dtype, of which inputs are kept."""
    recurrent_dtype: torch.dtype = torch.float32


ONE_STATE = StatePool()


Alike = tuple[bool, int, int, int, int]


def alike(specs: Sequence[LayerCacheSpec], group: KVGroup, num_slots: int) -> list[tuple[Alike, list[int]]]:
    """Layers of a group that cache tensors alike, by whether these are of an indexer, by P, K, S and H; these last.
    Blocks have ``num_slots`` positions."""
    found: dict[Alike, list[int]] = {}
    for i in group.layers:
        spec = specs[i]
        if spec.shared_with is None:
            kind = spec.num_tensors, spec.num_kv_heads, spec.num_slots(num_slots), spec.head_dim
            found.setdefault((False, *kind), []).append(i)
        if spec.index_dim:
            found.setdefault((True, 1, 1, num_slots, spec.index_dim), []).append(i)
    return sorted(found.items(), key=lambda item: item[0][0])


class KVStorage:
    """A pool of blocks for each KV group; ``layers[i]`` holds layer i's views of its group's pool, ``[N, K, S, H]``.

    Layers with recurrent state hold views ``[slots, ...]`` of ``state_pools``, alone or besides.

    ``pools[g]`` has one tensor ``[L, P, N, K, S, H]`` for each set of layers of group g with equal P, K, S and H, and
    for the keys of their indexers. The
    memory is not initialised: nothing may be read before it is written.
    """

    def __init__(
        self,
        specs: Sequence[LayerCacheSpec],
        groups: Sequence[KVGroup],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_draft_layers: int = 0,
        scales: Mapping[int, KVScales] = MappingProxyType({}),
        states: StatePool = ONE_STATE,
        context: ContextRanks | None = None,
        sequences: Collective | None = None,
    ) -> None:
        """``num_blocks`` has one count per group; the last ``num_draft_layers`` layers are those of a drafter.

        ``scales`` are those of layers whose keys and values are stored scaled. ``context``: the ranks that divide the
        ``block_size`` positions of each block, if any do. ``sequences``: the ranks that have the blocks of their own
        sequences, if they do; blocks then count through the ranks.
        """
        self.block_size, self.num_blocks = block_size, tuple(num_blocks)
        self.context, self.sequences = context, sequences
        num_slots = block_size if context is None else block_size // context.size
        self.dtype = dtype
        self.device = device
        stored = STORED.get(dtype, dtype)
        self.is_scaled = bool(scales)
        self.pools: list[list[Tensor]] = []
        self.routes_NC: Tensor | None = None
        """The experts that routers selected for the position of each slot; ``None`` where they are not kept."""
        caches: dict[int, LayerCache] = {}
        for index, (group, count) in enumerate(zip(groups, num_blocks, strict=True)):
            pool = []
            for (is_index, P, K, S, H), layers in alike(specs, group, num_slots):
                shape = len(layers), P, count, K, S, row_length(stored, H)
                pool.append(torch.empty(shape, dtype=stored, device=device))
                for i, part in zip(layers, pool[-1], strict=True):
                    if is_index:
                        caches[i] = caches[i]._replace(index_keys=part[0])
                    else:
                        caches[i] = LayerCache(part[0], part[-1], index, scales.get(i), context=context)
            for routes in filter(None, (specs[i].routes for i in group.layers)):
                assert index == 0, "what routers select is kept where no window gives up blocks"
                assert context is None, "each rank has what routers select at all positions"
                size, of = routes.num_layers * routes.num_chosen, torch.uint8 if routes.itemsize == 1 else torch.int16
                pool.append(torch.zeros(1, 1, count, 1, block_size, size, dtype=of, device=device))
                self.routes_NC = pool[-1].view(count * block_size, size)
            self.pools.append(pool)
        self.state_pools: list[Tensor] = []
        """``[L, slots, ...]`` for each set of equal tensors of recurrent state."""
        nothing = torch.empty(0, dtype=stored, device=device)
        for i, own in self._allocate_states(specs, states).items():
            caches[i] = caches.get(i, LayerCache(nothing, nothing))._replace(states=own)
        every = _of_layers(specs, caches)
        self.layers = every[: len(every) - num_draft_layers]
        self.draft_layers = every[len(self.layers) :]
        for cache in self.draft_layers:  # a drafter that rested reads what it has not written
            for kept in (cache.keys, cache.values, *([] if cache.index_keys is None else [cache.index_keys])):
                kept.zero_()

    def _allocate_states(self, specs: Sequence[LayerCacheSpec], pool: StatePool) -> dict[int, tuple[Tensor, ...]]:
        """The views of each layer that has a state, or caches nothing."""
        places: dict[StateTensor, list[tuple[int, int]]] = {}
        for i, spec in enumerate(specs):
            for place, tensor in enumerate(spec.state):
                places.setdefault(tensor, []).append((i, place))
        views: dict[int, dict[int, Tensor]] = {
            i: {} for i, spec in enumerate(specs) if spec.state or spec.kind == "state"
        }
        for tensor, found in places.items():
            dtype = pool.recurrent_dtype if tensor.is_recurrent else pool.dtype
            shape = len(found), pool.num_slots, *tensor.shape
            self.state_pools.append(torch.empty(shape, dtype=dtype, device=self.device))
            for (i, place), view in zip(found, self.state_pools[-1], strict=True):
                views[i][place] = view
        return {i: tuple(own[place] for place in sorted(own)) for i, own in views.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors."""
        return [*(part for pool in self.pools for part in pool), *self.state_pools]

    @property
    def num_groups(self) -> int:
        return len(self.pools)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of the first group, in all its layers."""
        return sum(part[:, :, 0].nbytes for part in self.pools[0])

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one slot of recurrent state, in all layers."""
        return sum(pool[:, 0].nbytes for pool in self.state_pools)

    def contents(self, pool: str) -> list[Tensor]:
        """Views ``[A, N, R]`` of what is at N places, blocks of the first group or slots of recurrent state, in all
        layers. ``pool``: see ``ReadPlaces``."""
        if pool == "routes":
            assert self.routes_NC is not None, "it is not kept"
            return [self.routes_NC.view(1, self.num_blocks[0], -1)]
        if pool == "states":
            return [states.view(*states.shape[:2], -1) for states in self.state_pools]
        return [part.flatten(3).flatten(0, 1) for part in self.pools[0]]

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of block ``source``, in all layers of a group, to ``target``."""
        if self.sequences is not None:
            rank, count = self.sequences.rank, self.num_blocks[group]
            if source // count != rank:
                return
            source, target = source % count, target % count
        num_tokens = num_tokens if self.context is None else self.context.part.count(num_tokens)
        for pool_LPNKSH in self.pools[group]:  # of entries of several positions, those that are not whole are unused
            pool_LPNKSH[:, :, target, :, :num_tokens] = pool_LPNKSH[:, :, source, :, :num_tokens]

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent state in slot ``source``, in all layers, to ``target``."""
        for pool in self.state_pools:
            pool[:, target] = pool[:, source]


def _of_layers(specs: Sequence[LayerCacheSpec], caches: Mapping[int, LayerCache]) -> list[LayerCache]:
    """The cache of each layer, with what it caches besides."""
    whole = dict(caches)
    for i, spec in enumerate(specs):
        if spec.beside is not None:
            own = whole[spec.beside]
            whole[spec.beside] = own._replace(beside=(*own.beside, caches[i]))
    every = [i if spec.shared_with is None else spec.shared_with for i, spec in enumerate(specs) if spec.beside is None]
    return [whole[i] for i in every]
