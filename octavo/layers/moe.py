"""Feed-forward layers made of experts, of which a router chooses some for each token.

Shapes: T tokens, D model, X experts, S chosen for a token.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from octavo import ops
from octavo.layers.norm import RMSNorm
from octavo.ops.moe import Experts

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From normalised rows [T, D] to the experts of each, int64 [T, S], and their shares, float32 [T, S]."""


class SoftmaxRouter:
    """The most probable experts by a softmax over all; with ``normalises`` their shares are made to sum to 1."""

    def __init__(self, weight_XD: Tensor, num_chosen: int, normalises: bool) -> None:
        self.weight_XD = weight_XD
        self.num_chosen = num_chosen
        self.normalises = normalises

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        shares_TX = router_logits(x_TD, self.weight_XD).softmax(dim=-1)
        shares_TS, ids_TS = shares_TX.topk(self.num_chosen, dim=-1)
        if self.normalises:
            shares_TS = shares_TS / shares_TS.sum(dim=-1, keepdim=True)
        return ids_TS, shares_TS


class TopLogitsRouter:
    """The experts of the highest logits; their shares are a softmax over these alone."""

    def __init__(self, weight_XD: Tensor, bias_X: Tensor, num_chosen: int) -> None:
        self.weight_XD = weight_XD
        self.bias_X = bias_X
        self.num_chosen = num_chosen

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TX = router_logits(x_TD, self.weight_XD) + self.bias_X
        logits_TS, ids_TS = logits_TX.topk(self.num_chosen, dim=-1)
        return ids_TS, logits_TS.softmax(dim=-1)


def router_logits(x_TD: Tensor, weight_XD: Tensor) -> Tensor:
    """Float32 [T, X] whatever the dtype of x: a logit rounded to 16 bits may choose another expert."""
    return ops.linear(x_TD.float(), weight_XD)


class MoE:
    """``x + experts(norm(x))``, and what all tokens share beside the experts, if there is such a thing."""

    def __init__(
        self, norm: RMSNorm, router: Router, experts: Experts, shared: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.norm = norm
        self.router = router
        self.experts = experts
        self.shared = shared

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The next residual stream; ``x`` may be overwritten."""
        h_TD = self.norm(x_TD)
        y_TD = ops.moe(h_TD, *self.router(h_TD), self.experts)
        if self.shared is not None:
            y_TD = y_TD + self.shared(h_TD)
        return x_TD.add_(y_TD)
