"""Which experts the routers of a mixture select: kept by slot beside keys and values, and given to the routers.

So they are found again with a cached prefix, and are copied, offloaded and given up with its blocks. Layers without
experts have zeros.

Shapes: L layers, M layers with routers, T rows, S experts selected for a row, N slots, C = L S columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import ops
from octavo.errors import ConfigError
from octavo.layers.moe import ExpertRouter, Routes
from octavo.model_info import RoutesInfo
from octavo.models.model_config import ModelConfig
from octavo.runtime.kv_storage import KVStorage
from octavo.steps.messages import GivenRoutes


def routers_of(model: Any) -> dict[int, ExpertRouter]:
    """The routers of a model by the number of their layer. No layer has two."""
    found = {}
    for number, layer in enumerate(getattr(model, "layers", ())):
        while "_layer" in vars(layer):  # what keeps a layer's input, or leaves it out
            layer = vars(layer)["_layer"]
        for part in (layer, *vars(layer).values()):
            router = getattr(part, "router", None)
            if isinstance(router, ExpertRouter):
                found[number] = router
    return found


def keeping_routes(config: ModelConfig, model: Any, is_asked: bool) -> ModelConfig:
    """The configuration of a model, with what shall be kept of its routers. Raises ``ConfigError`` if it has none."""
    if not is_asked:
        return config
    routers = routers_of(model)
    if not routers:
        raise ConfigError("enable_return_routed_experts: this model has no routers of experts")
    counts = {(router.routing.num_chosen, len(router.weight_XD)) for router in routers.values()}
    if len(counts) > 1:
        raise ConfigError("enable_return_routed_experts: the layers of this model have different numbers of experts")
    takes_given = all(router.takes_given for router in routers.values())
    routes = RoutesInfo(len(model.layers), *counts.pop(), tuple(sorted(routers)), takes_given)
    return dataclasses.replace(config, routes=routes)


class RoutedExperts:
    """The routers of a model, and the table of what they selected."""

    def __init__(self, model: Any, storage: KVStorage) -> None:
        assert storage.routes_NC is not None
        routers = routers_of(model)
        known = (router.reports.routes for router in routers.values() if router.reports is not None)
        self._routes = next(known, None) or Routes()
        for layer, router in routers.items():
            router.report_to(self._routes, layer)
        self.table_NC = storage.routes_NC
        self.num_chosen = next(iter(routers.values())).routing.num_chosen
        columns = [layer * self.num_chosen for layer in sorted(routers)]
        self._columns_M = torch.tensor(columns, dtype=torch.int64, device=self.table_NC.device)

    @classmethod
    def of(cls, model: Any, storage: KVStorage) -> RoutedExperts | None:
        """``None`` if the storage has no room for them."""
        return None if storage.routes_NC is None else cls(model, storage)

    @contextlib.contextmanager
    def kept(self, slots_T: Tensor, given: Sequence[GivenRoutes]) -> Iterator[None]:
        """Keep what the forward pass in this block selects for rows of these slots, some of which is given."""
        routes = self._routes
        routes.kept = {}
        routes.given_LTS = self._table_of(given, len(slots_T)) if given else None
        try:
            yield
            found = [routes.kept[layer] for layer in sorted(routes.kept)]
            if len(found) == len(self._columns_M):  # not where layers of a kind are left out to compile kernels
                ops.keep_routes(torch.stack(found), self._columns_M, slots_T, self.table_NC)
        finally:
            routes.kept = routes.given_LTS = None

    def _table_of(self, given: Sequence[GivenRoutes], num_rows: int) -> Tensor:
        """int64 [L, T, S]; rows without given experts have -1."""
        S = self.num_chosen
        L = self.table_NC.shape[1] // S
        table_LTS = torch.full((L, num_rows, S), -1, dtype=torch.int64)
        for rows in given:
            ids_RLS = torch.from_numpy(np.frombuffer(rows.ids, np.uint16).astype(np.int64)).view(-1, L, S)
            table_LTS[:, rows.first_row : rows.first_row + len(ids_RLS)] = ids_RLS.transpose(0, 1)
        return table_LTS.to(self.table_NC.device)
