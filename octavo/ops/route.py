"""The norm and the router of a mixture of experts: which experts a token uses, and the weight of each ("share").

Shapes: T tokens, D model, X experts, S experts selected per token, G groups of consecutive experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.elementwise import sigmoid
from octavo.ops.linear import linear
from octavo.ops.rms_norm import rms_norm

SMALLEST_SUM = 1e-20
"""Added to sums of shares that are divided by."""


class Routing(NamedTuple):
    """How experts are selected from a token's logits, for all families of models."""

    num_chosen: int
    normalises: bool = False
    """Whether the shares of a token are divided by their sum. With softmax they are then the softmax over the selected
    logits alone."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How scores are computed from logits; the shares are scores of the selected experts."""
    scale: float = 1.0
    """Shares are multiplied by it at last."""
    groups: tuple[int, int] = (1, 1)
    """Number of groups, and of groups selected for a token: experts of other groups are not selected."""
    bias_X: Tensor | None = None
    """Float32; added to the logits."""
    correction_X: Tensor | None = None
    """Float32; added to the scores for the selection alone. With it a group's worth is the sum of its two best experts,
    without it that of its best."""


@op
def route(
    x_TD: Tensor, norm_D: Tensor, eps: float, weight_XD: Tensor, routing: Routing
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows [T, D], as of ``rms_norm``; each one's experts, int64 [T, S]; and their shares, float32 [T, S].

    Experts are distinct and valid whatever the numbers are. Logits are ``rms_norm(x) @ weight.T`` with sums in float32
    that are not rounded to the dtype of x: rounding could change the selection. The weight is of float32 or of the
    dtype of x.
    """
    normed_TD = rms_norm(x_TD, norm_D, eps)
    logits_TX = linear(normed_TD.float(), weight_XD)
    if routing.bias_X is not None:
        logits_TX = logits_TX + routing.bias_X
    scores_TX = logits_TX.softmax(dim=-1) if routing.scoring == "softmax" else sigmoid(logits_TX)
    worth_TX = logits_TX if routing.correction_X is None else scores_TX + routing.correction_X
    if routing.groups[0] > 1:
        worth_TX = _without_other_groups(worth_TX, routing)
    ids_TS = worth_TX.topk(routing.num_chosen, dim=-1).indices
    shares_TS = scores_TX.gather(1, ids_TS)
    if routing.normalises:
        shares_TS = shares_TS / (shares_TS.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return normed_TD, ids_TS, shares_TS * routing.scale


def _without_other_groups(worth_TX: Tensor, routing: Routing) -> Tensor:
    """Set the worth of experts outside the best groups to -inf."""
    (T, X), (G, num_chosen) = worth_TX.shape, routing.groups
    worth_TGE = worth_TX.view(T, G, X // G)
    worth_TG = worth_TGE.topk(1 if routing.correction_X is None else 2, dim=-1).values.sum(dim=-1)
    best = worth_TG.topk(num_chosen, dim=-1).indices
    is_hidden_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, best, False)
    return worth_TGE.masked_fill(is_hidden_TG.unsqueeze(-1), float("-inf")).flatten(1)
