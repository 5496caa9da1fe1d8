"""Mixture-of-experts feed-forward layers: a router selects some experts for each token.

Shapes: T tokens, D model, X experts, S experts selected per token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear
from octavo.layers.norm import Norm, RMSNorm
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.ops.linear.linear import Activation
from octavo.ops.moe import CappedSwish, ClampedSwish, Routing, SoftcappedSwish


class Routes(threading.local):
    """The experts that the routers of a model select in a step, by layer: kept for who asks, or given to them.

    Each thread has its own, as kernels are compiled in one of their own by steps that nobody asked for.
    """

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] | None = None
        """int64 [T, S] of each layer that has a router; ``None``: nobody asks."""
        self.given_LTS: Tensor | None = None
        """See ``ops.route``."""


class Reports(NamedTuple):
    """Where a router keeps what it selects, and takes what is given: nothing that other weights change."""

    routes: Routes
    layer: int


class ExpertRouter:
    """Normalises rows, if there is a norm, and selects experts for them and how much each counts; see ``ops.route``."""

    takes_given = True
    """Whether it can be given experts to take."""

    def __init__(self, norm: Norm | None, weight_XD: Tensor, routing: Routing) -> None:
        self.norm = norm
        self.weight_XD = weight_XD
        self.routing = routing
        self.reports: Reports | None = None

    def report_to(self, routes: Routes, layer: int) -> None:
        """Keep there what it selects, as the router of this layer, and take what is given there."""
        self.reports = Reports(routes, layer)

    def __call__(self, x_TD: Tensor, fixed_TS: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``fixed``: the experts that rows have whatever their scores are, unless others are given."""
        if self.reports is None:
            return self.select(x_TD, fixed_TS)
        routes, layer = self.reports
        given_TS = fixed_TS if routes.given_LTS is None else routes.given_LTS[layer]
        if given_TS is not None and fixed_TS is not None:
            given_TS = torch.where(given_TS[:, :1] < 0, fixed_TS, given_TS)
        found = self.select(x_TD, given_TS)
        if routes.kept is not None:
            routes.kept[layer] = found[1].clone()  # which no recorded step repeats: each must keep its own
        return found

    def select(self, x_TD: Tensor, given_TS: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """See ``ops.route``."""
        if type(self.norm) is RMSNorm:
            return ops.route(x_TD, self.norm.weight_D, self.norm.eps, self.weight_XD, self.routing, given_TS)
        h_TD = x_TD if self.norm is None else self.norm(x_TD)
        return ops.route(h_TD, None, 0.0, self.weight_XD, self.routing, given_TS)


@dataclass(eq=False)
class SharedExpert:
    """``scale * down(act(gate(x)) * up(x))`` for all tokens, times ``sigmoid(share(x))`` with a gate ``share``."""

    gate_up: Linear
    down: Linear
    activation: Activation | CappedSwish | ClampedSwish | SoftcappedSwish
    share: Linear | None = None
    scale: float = 1.0

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Its result, plus ``residual``, which may be overwritten."""
        if isinstance(self.activation, str):
            gated_TF = self.gate_up(x_TD, activation=self.activation)
        else:
            gated_TF = self.activation(self.gate_up(x_TD))
        if self.share is None and self.scale == 1.0:
            return self.down(gated_TF, residual=residual_TD)
        share = self.scale if self.share is None else self.share(x_TD)
        return ops.add_scaled(self.down(gated_TF), share, residual_TD)


@dataclass(eq=False)
class MoE:
    """``x + after(experts(norm(x)) + shared(norm(x)))``, with what there is of a shared expert and of norms.

    ``experts`` and ``shared`` give this rank's part of the sums; ``after`` also adds its second argument, ``x``.
    """

    router: ExpertRouter
    experts: Mixture
    shared: SharedExpert | None = None
    collective: Collective = SINGLE_RANK
    after: Callable[[Tensor, Tensor], Tensor] | None = None

    def __call__(self, x_TD: Tensor, fixed_TS: Tensor | None = None) -> Tensor:
        """The next residual stream; ``x`` may be overwritten. ``fixed``: see ``ExpertRouter``."""
        h_TD, ids_TS, shares_TS = self.router(x_TD, fixed_TS)
        if self.after is not None:
            return self.after(self.collective.all_reduce(self._sum(h_TD, ids_TS, shares_TS, None)), x_TD)
        own_TD = x_TD if self.collective.size == 1 else None  # of several ranks, the sum over them takes it along
        if h_TD is x_TD and own_TD is not None:  # without a norm, which experts must not overwrite
            own_TD = ops.concat(x_TD)
        y_TD = self._sum(h_TD, ids_TS, shares_TS, own_TD)
        return y_TD if own_TD is not None else self.collective.all_reduce(y_TD, residual_TD=x_TD)

    def _sum(self, h_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None) -> Tensor:
        y_TD = self.experts(h_TD, ids_TS, shares_TS, residual_TD)
        return y_TD if self.shared is None else self.shared(h_TD, y_TD)
