"""Mixtures of experts: the router, and the selected experts of dense or packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.ops.activation import clamped_swish, squared_relu
from octavo.ops.dispatch import op, op_of_ids
from octavo.ops.elementwise import sigmoid, softplus
from octavo.ops.linear.grouped_linear import TILE, PackedGroups
from octavo.ops.linear.linear import Activation, Fused, linear
from octavo.ops.norms import rms_norm

# ---- route: The norm and the router of a mixture of experts: which experts a token uses, and the weight of each
# ("share"). Shapes: T tokens, D model, X experts, S experts selected per token, G groups of consecutive experts.


SMALLEST_SUM = 1e-20
"""Added to sums of shares that are divided by."""


Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
"""The last: square roots of softplus (DeepSeek-V4)."""


class Routing(NamedTuple):
    """How experts are selected from a token's logits, for all families of models."""

    num_chosen: int
    normalises: bool = False
    """Whether the shares of a token are divided by their sum. With softmax they are then the softmax over the selected
    logits alone."""
    scoring: Scoring = "softmax"
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
    corrects_logits: bool = False
    """Whether the correction is added to logits, not to scores."""


@op
def route(
    x_TD: Tensor, norm_D: Tensor | None, eps: float, weight_XD: Tensor, routing: Routing, given_TS: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised rows [T, D], as of ``rms_norm``, or x itself without ``norm_D``; each one's experts, int64 [T, S]; and
    their shares, float32 [T, S].

    Experts are distinct and valid whatever the numbers are. Logits are ``rms_norm(x) @ weight.T`` with sums in float32
    that are not rounded to the dtype of x: rounding could change the selection. The weight is of float32 or of the
    dtype of x.

    Rows of ``given``, int64, are experts that are taken instead of the best, with the shares that these have; a row
    that begins with a negative number has none.
    """
    normed_TD = x_TD if norm_D is None else rms_norm(x_TD, norm_D, eps)
    logits_TX = linear(normed_TD.float(), weight_XD)
    if routing.bias_X is not None:
        logits_TX = logits_TX + routing.bias_X
    scores_TX = _scores(logits_TX, routing.scoring)
    worth_TX = logits_TX
    if routing.correction_X is not None:
        worth_TX = (logits_TX if routing.corrects_logits else scores_TX) + routing.correction_X
    if routing.groups[0] > 1:
        worth_TX = _without_other_groups(worth_TX, routing)
    ids_TS = worth_TX.topk(routing.num_chosen, dim=-1).indices
    if given_TS is not None:
        ids_TS = torch.where(given_TS[:, :1] < 0, ids_TS, given_TS)
    shares_TS = scores_TX.gather(1, ids_TS)
    if routing.normalises:
        shares_TS = shares_TS / (shares_TS.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return normed_TD, ids_TS, shares_TS * routing.scale


def _scores(logits_TX: Tensor, scoring: Scoring) -> Tensor:
    if scoring == "softmax":
        return logits_TX.softmax(dim=-1)
    return sigmoid(logits_TX) if scoring == "sigmoid" else softplus(logits_TX).sqrt()


@op_of_ids
def keep_routes(ids_MTS: Tensor, columns_M: Tensor, slots_T: Tensor, table_NC: Tensor) -> None:
    """Write the experts [M, T, S], int64, that M routers selected for T rows to the rows' slots: those of router m to
    columns ``columns[m]`` and following of ``table``, in its dtype. Rows with a negative slot are left out."""
    rows = (slots_T >= 0).nonzero()[:, 0]
    places = (columns_M.unsqueeze(1) + torch.arange(ids_MTS.shape[2], device=columns_M.device)).flatten()
    kept = ids_MTS[:, rows].transpose(0, 1).flatten(1)
    table_NC[slots_T[rows].unsqueeze(1), places] = kept.to(table_NC.dtype)


@op_of_ids
def local_expert_ids(ids_TS: Tensor, slots_XW: Tensor, load_X: Tensor | None = None) -> Tensor:
    """Where on this rank a chosen expert is, int64 [T, S]; -1 where another rank computes it, and for an id of -1.
    ``slots``, int64, has a column for each of W ranks: token t takes column t % W, so that copies of an expert take
    turns. To ``load``, int64, is added how often each expert was chosen."""
    if load_X is not None:
        load_X += (ids_TS.flatten() + 1).bincount(minlength=len(load_X) + 1)[1:]
    turns_T = torch.arange(len(ids_TS), device=ids_TS.device) % slots_XW.shape[1]
    return slots_XW[ids_TS, turns_T.unsqueeze(1)].where(ids_TS >= 0, -1)


def _without_other_groups(worth_TX: Tensor, routing: Routing) -> Tensor:
    """Set the worth of experts outside the best groups to -inf."""
    (T, X), (G, num_chosen) = worth_TX.shape, routing.groups
    worth_TGE = worth_TX.view(T, G, X // G)
    worth_TG = worth_TGE.topk(1 if routing.correction_X is None else 2, dim=-1).values.sum(dim=-1)
    best = worth_TG.topk(num_chosen, dim=-1).indices
    is_hidden_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, best, False)
    return worth_TGE.masked_fill(is_hidden_TG.unsqueeze(-1), float("-inf")).flatten(1)


# ---- moe: Mixture of experts: the selected experts of any number of tokens. Shapes: T tokens, D model, X experts, S
# chosen for a token, F the width of an expert.


class ClampedSwish(NamedTuple):
    """See ``ops.clamped_swish``."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        return clamped_swish(gate_up, self.alpha, self.limit)


class CappedSwish(NamedTuple):
    """The gate of Step 3.5: ``min(silu(gate), limit) * up``, ups within ``limit`` of zero; that of DeepSeek-V4 has a
    cap of its own: ``silu(limit)``, which gates of at most ``limit`` have at most."""

    limit: float
    cap: float | None = None
    """Of ``silu(gate)``, if not the limit."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
        gate, up = wide.chunk(2, dim=-1)
        capped = (gate * sigmoid(gate)).clamp(max=self.limit if self.cap is None else self.cap)
        return (capped * up.clamp(-self.limit, self.limit)).to(gate_up.dtype)


class SquaredReLU(NamedTuple):
    """See ``ops.squared_relu``; of experts without gates."""

    def __call__(self, up: Tensor) -> Tensor:
        return squared_relu(up)


class SoftcappedSwish(NamedTuple):
    """The gate of Inkling 2: ``g tanh(gate / g) * sigmoid(gate) * u tanh(up / u)``."""

    gate_cap: float
    up_cap: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
        gate, up = wide.chunk(2, dim=-1)
        capped = self.gate_cap * torch.tanh(gate / self.gate_cap) * sigmoid(gate)
        return (capped * (self.up_cap * torch.tanh(up / self.up_cap))).to(gate_up.dtype)


ExpertActivation = Activation | ClampedSwish | CappedSwish | SoftcappedSwish | SquaredReLU


def has_gates(activation: ExpertActivation) -> bool:
    """Whether the first product of an expert gives gates and ups, or ups alone."""
    return not isinstance(activation, SquaredReLU)


class SeparateExperts(Protocol):
    """All experts of a layer, each of which can be computed by itself. Their weights stay where they are."""

    @property
    def num_experts(self) -> int: ...

    def expert(self, index: int, x_RD: Tensor) -> Tensor:
        """An expert's result [R, D] for some rows; a new tensor."""
        ...


@dataclass(frozen=True, eq=False)
class Experts:
    """The weights of all experts of a layer, dense and of one dtype."""

    gate_up: Tensor
    """[X, 2 F, D]: each expert's F gates, then its F ups; ups alone where there are no gates."""
    down: Tensor
    """[X, D, F]"""
    activation: ExpertActivation = "silu"
    gate_up_bias: Tensor | None = None
    """[X, 2 F]"""
    down_bias: Tensor | None = None
    """[X, D]"""
    num_routed: int = 0
    """Experts among which tokens choose, where these are some of them; 0: there are no others."""

    @property
    def num_experts(self) -> int:
        return len(self.gate_up)

    def expert(self, index: int, x_RD: Tensor) -> Tensor:
        """See ``SeparateExperts``."""
        biases = (None if bias is None else bias[index] for bias in (self.gate_up_bias, self.down_bias))
        return _expert(x_RD, self.gate_up[index], self.down[index], self.activation, *biases)


@op
def moe(x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: Experts, residual_TD: Tensor | None = None) -> Tensor:
    """For each token, ``residual`` plus the sum over its experts of ``share * down(act(gate(x)) * up(x))``, or of
    ``share * down(act(up(x)))`` without gates.

    ``ids`` are int64, distinct within a row; ``shares`` are the float32 routing weights. Where ``experts`` are some of
    ``num_routed``, an id of -1 stands for one that is not among them, and adds nothing. Each expert's rows are computed
    together; a row is summed in float32 at least, in an order that does not depend on the other rows. The result has
    x's dtype; ``residual``, which shares no memory with x, may be overwritten and returned.
    """
    return sum_over_experts(x_TD, ids_TS, shares_TS, experts, residual_TD)


RESULT_ROWS = 1024
"""Most rows of which a kernel of CPUs keeps the results of all chosen experts at once."""


@op
def sum_over_experts(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: SeparateExperts, residual_TD: Tensor | None = None
) -> Tensor:
    """``moe`` for experts of any kind; a row is summed in the order of its experts' numbers."""
    S = ids_TS.shape[1]
    order = ids_TS.flatten().argsort(stable=True)
    counts = torch.bincount(ids_TS.flatten() + 1, minlength=experts.num_experts + 1).tolist()
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    sum_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    shares = shares_TS.flatten().to(wide)
    for i, places in enumerate(torch.split(order, counts), -1):
        if i >= 0 and len(places):
            tokens = places // S
            rows = experts.expert(i, x_TD[tokens]).to(wide)
            sum_TD.index_add_(0, tokens, rows * shares[places].unsqueeze(1))
    return sum_TD.to(x_TD.dtype) if residual_TD is None else residual_TD.add_(sum_TD)


def _expert(
    x_RD: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: ExpertActivation,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> Tensor:
    if isinstance(activation, str):
        gated_RF = linear(x_RD, gate_up, Fused(up_bias, activation=activation))
    else:
        gated_RF = activation(linear(x_RD, gate_up, Fused(up_bias)))
    return linear(gated_RF, down, Fused(down_bias))


# ---- grouped_moe: Mixture of experts whose weights are packed groups. Shapes: T tokens, D model, X experts, S chosen
# for a token, F the width of an expert.


class GroupedExperts(NamedTuple):
    """The weights of all experts of a layer, one expert's rows after the other's."""

    num_experts: int
    gate_up: PackedGroups
    """[X 2 F, D]: each expert's F gates, then its F ups, or ups alone; their number and D are multiples of 16."""
    down: PackedGroups
    """[X D, F]"""
    activation: ExpertActivation = "silu"
    gate_up_bias: Tensor | None = None
    """[X, 2 F]"""
    down_bias: Tensor | None = None
    """[X, D]"""
    num_routed: int = 0
    """See ``Experts``."""

    def expert(self, index: int, x_RD: Tensor) -> Tensor:
        """See ``SeparateExperts``; it unpacks the weights."""
        gate_up, down = (_own(packed, index, self.num_experts, x_RD) for packed in (self.gate_up, self.down))
        biases = (None if bias is None else bias[index] for bias in (self.gate_up_bias, self.down_bias))
        return _expert(x_RD, gate_up, down, self.activation, *biases)


def join_experts(parts: list[PackedGroups]) -> PackedGroups | None:
    """Weights of experts, of one or several each, one after the other; ``None`` where they differ in form or do not end
    with a whole tile."""
    first = parts[0]
    forms = {(part.number, part.shape[1], part.group, part.zeros_GN is None, part.minima_GN is None) for part in parts}
    if len(forms) > 1 or any(part.shape[0] % TILE or part.order_K is not None for part in parts):
        return None
    return PackedGroups(
        first.number,
        (sum(part.shape[0] for part in parts), first.shape[1]),
        torch.cat([part.words for part in parts]),
        _joined([part.scales_GN for part in parts]),
        None if first.zeros_GN is None else _joined([part.zeros_GN for part in parts if part.zeros_GN is not None]),
        None if first.minima_GN is None else _joined([part.minima_GN for part in parts if part.minima_GN is not None]),
    )


def _joined(scales: list[Tensor]) -> Tensor:
    """Numbers [G, N] of several weights, in float32 if their types differ."""
    dtype = scales[0].dtype if len({part.dtype for part in scales}) == 1 else torch.float32
    return torch.cat([part.to(dtype) for part in scales], dim=1)


@op
def grouped_moe(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: GroupedExperts, residual_TD: Tensor | None = None
) -> Tensor:
    """``ops.moe`` with weights as in ``ops.grouped_linear``."""
    return sum_over_experts.reference(x_TD, ids_TS, shares_TS, experts, residual_TD)


def _own(packed: PackedGroups, index: int, count: int, like: Tensor) -> Tensor:
    rows = packed.shape[0] // count
    return packed.rows(torch.arange(index * rows, (index + 1) * rows, device=like.device)).to(like.dtype)
