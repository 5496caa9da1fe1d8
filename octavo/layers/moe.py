"""Mixture-of-experts feed-forward layers: a router selects some experts for each token.

Shapes: T tokens, D model, X experts, S experts selected per token.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.ops.elementwise import sigmoid
from octavo.ops.linear import Activation
from octavo.ops.moe import Routing


class Router:
    """Normalises rows, and selects experts for them and how much each counts; see ``ops.route``."""

    def __init__(self, norm: RMSNorm, weight_XD: Tensor, routing: Routing) -> None:
        self.norm = norm
        self.weight_XD = weight_XD
        self.routing = routing

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ops.route(x_TD, self.norm.weight_D, self.norm.eps, self.weight_XD, self.routing)


class SharedExpert:
    """``down(act(gate(x)) * up(x))`` for all tokens, times ``sigmoid(share(x))`` if there is a gate ``share``."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, share: Linear | None = None) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.share = share

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """Its result, plus ``residual``, which may be overwritten."""
        gated_TF = self.gate_up(x_TD, activation=self.activation)
        if self.share is None:
            return self.down(gated_TF, residual=residual_TD)
        return residual_TD.add_(self.down(gated_TF).mul_(sigmoid(self.share(x_TD))))


class MoE:
    """``x + experts(norm(x)) + shared(norm(x))``, the last term if there is a shared expert.

    ``experts`` and ``shared`` give this rank's part of the sums.
    """

    def __init__(
        self,
        router: Router,
        experts: Mixture,
        shared: SharedExpert | None = None,
        collective: Collective = SINGLE_RANK,
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.collective = collective

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The next residual stream; ``x`` may be overwritten."""
        h_TD, ids_TS, shares_TS = self.router(x_TD)
        own_TD = x_TD if self.collective.size == 1 else None  # of several ranks, the sum over them takes it along
        y_TD = self.experts(h_TD, ids_TS, shares_TS, own_TD)
        if self.shared is not None:
            y_TD = self.shared(h_TD, y_TD)
        return y_TD if own_TD is not None else self.collective.all_reduce(y_TD, residual_TD=x_TD)
