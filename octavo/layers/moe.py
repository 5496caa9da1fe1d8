"""Mixture-of-experts feed-forward layers: a router selects some experts for each token.

Shapes: T tokens, D model, X experts, S experts selected per token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.ops.linear import Activation

Router = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps normalised rows [T, D] to each row's experts, int64 [T, S], and routing weights ("shares"), float32 [T, S]."""


class SoftmaxRouter:
    """Selects the top experts by softmax over all; with ``normalises`` their weights are normalised to sum to 1."""

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
    """Selects the experts with the highest logits; their weights are the softmax over the selected logits alone."""

    def __init__(self, weight_XD: Tensor, bias_X: Tensor, num_chosen: int) -> None:
        self.weight_XD = weight_XD
        self.bias_X = bias_X
        self.num_chosen = num_chosen

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TX = router_logits(x_TD, self.weight_XD) + self.bias_X
        logits_TS, ids_TS = logits_TX.topk(self.num_chosen, dim=-1)
        return ids_TS, logits_TS.softmax(dim=-1)


class GroupRouter:
    """Selects the best experts within the best groups (group-limited routing); groups are consecutive experts.

    Without a bias, scores are a softmax over all experts and a group's score is that of its best expert. With a bias,
    scores are sigmoids, the bias is added for selection only, and a group's score is the sum of its two best.
    """

    def __init__(
        self,
        weight_XD: Tensor,
        bias_X: Tensor | None,
        num_chosen: int,
        groups: tuple[int, int],
        normalises: bool,
        share_scale: float,
    ) -> None:
        self.weight_XD = weight_XD
        self.bias_X = bias_X
        self.num_chosen = num_chosen
        self.num_groups, self.num_chosen_groups = groups
        self.normalises = normalises
        self.share_scale = share_scale

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        logits_TX = router_logits(x_TD, self.weight_XD)
        scores_TX = logits_TX.softmax(dim=-1) if self.bias_X is None else logits_TX.sigmoid()
        worth_TX = scores_TX if self.bias_X is None else scores_TX + self.bias_X
        if self.num_groups > 1:
            worth_TX = self._hide_groups(worth_TX)
        ids_TS = worth_TX.topk(self.num_chosen, dim=-1).indices
        shares_TS = scores_TX.gather(1, ids_TS)
        if self.normalises:
            shares_TS = shares_TS / (shares_TS.sum(dim=-1, keepdim=True) + 1e-20)
        return ids_TS, shares_TS * self.share_scale

    def _hide_groups(self, worth_TX: Tensor) -> Tensor:
        """Set the scores of experts outside the best groups to -inf."""
        by_group = worth_TX.view(len(worth_TX), self.num_groups, worth_TX.shape[1] // self.num_groups)
        worth_TG = by_group.topk(1 if self.bias_X is None else 2, dim=-1).values.sum(dim=-1)
        best = worth_TG.topk(self.num_chosen_groups, dim=-1).indices
        is_hidden_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, best, False)
        return by_group.masked_fill(is_hidden_TG.unsqueeze(-1), float("-inf")).flatten(1)


def router_logits(x_TD: Tensor, weight_XD: Tensor) -> Tensor:
    """Float32 [T, X] for any dtype of x: rounding logits to 16 bits could change the selected experts."""
    return ops.linear(x_TD.float(), weight_XD)


class SharedExpert:
    """``down(act(gate(x)) * up(x))`` for all tokens, times ``sigmoid(share(x))`` if there is a gate ``share``."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, share: Linear | None = None) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.share = share

    def __call__(self, x_TD: Tensor) -> Tensor:
        y_TD = self.down(self.gate_up(x_TD, activation=self.activation))
        return y_TD if self.share is None else y_TD.mul_(torch.sigmoid(self.share(x_TD)))


class MoE:
    """``x + experts(norm(x)) + shared(norm(x))``, the last term if there is a shared expert.

    ``experts`` and ``shared`` give this rank's part of the sums.
    """

    def __init__(
        self,
        norm: RMSNorm,
        router: Router,
        experts: Mixture,
        shared: Callable[[Tensor], Tensor] | None = None,
        collective: Collective = SINGLE_RANK,
    ) -> None:
        self.norm = norm
        self.router = router
        self.experts = experts
        self.shared = shared
        self.collective = collective

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The next residual stream; ``x`` may be overwritten."""
        h_TD = self.norm(x_TD)
        y_TD = self.experts(h_TD, *self.router(h_TD))
        if self.shared is not None:
            y_TD = y_TD + self.shared(h_TD)
        return self.collective.all_reduce(y_TD, residual_TD=x_TD)
