"""The router's op against a selection in plain Python, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.moe import Routing

T, D, X = 9, 16, 12
EPS = 1e-5

ROUTINGS = {
    "softmax": Routing(3),
    "softmax, normalised": Routing(3, normalises=True, scale=1.5),
    "bias": Routing(4, normalises=True, bias_X=torch.linspace(-1, 1, X)),
    "groups": Routing(3, groups=(4, 2), scale=16.0),
    "sigmoid, corrected logits": Routing(
        3, False, "sigmoid", correction_X=torch.linspace(-2, 2, X), corrects_logits=True
    ),
    "sigmoid, correction, groups": Routing(3, True, "sigmoid", 2.5, (3, 2), correction_X=torch.linspace(0.5, -0.5, X)),
    "roots of softplus": Routing(4, True, "sqrtsoftplus", 1.5, correction_X=torch.linspace(0.5, -0.5, X)),
}


def selected(logits: list[float], routing: Routing) -> dict[int, float]:
    """Experts and their shares."""
    correction = [0.0] * X if routing.correction_X is None else routing.correction_X.tolist()
    if routing.scoring == "softmax":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    elif routing.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    else:
        scores = [math.log1p(math.exp(logit)) ** 0.5 for logit in logits]
    of = logits if routing.corrects_logits else scores
    worth = [x + more for x, more in zip(of, correction, strict=True)]
    count, num_groups = routing.groups
    size = X // count
    groups = [sorted(worth[g * size : (g + 1) * size], reverse=True) for g in range(count)]
    value = [sum(group[: 1 if routing.correction_X is None else 2]) for group in groups]
    best = sorted(range(count), key=lambda g: -value[g])[:num_groups]
    chosen = sorted((e for e in range(X) if e // size in best), key=lambda e: -worth[e])[: routing.num_chosen]
    divisor = sum(scores[e] for e in chosen) if routing.normalises else 1.0
    return {e: scores[e] / divisor * routing.scale for e in chosen}


def check(found: tuple[Tensor, Tensor, Tensor], x_TD: Tensor, norm_D: Tensor, weight_XD: Tensor, name: str) -> None:
    """Assert that rows are normalised, and each has the right experts, from the best on, and their shares."""
    routing = ROUTINGS[name]
    normed_TD, ids_TS, shares_TS = (tensor.cpu() for tensor in found)
    x_TD, norm_D, weight_XD = (tensor.cpu().double() for tensor in (x_TD, norm_D, weight_XD))
    expected_TD = x_TD / (x_TD.square().mean(1, keepdim=True) + EPS).sqrt() * norm_D
    torch.testing.assert_close(normed_TD.double(), expected_TD, rtol=1e-5, atol=1e-6)
    assert ids_TS.dtype == torch.int64
    assert shares_TS.dtype == torch.float32
    logits_TX = expected_TD @ weight_XD.T
    if routing.bias_X is not None:
        logits_TX += routing.bias_X.double()
    for logits, ids, shares in zip(logits_TX.tolist(), ids_TS.tolist(), shares_TS.tolist(), strict=True):
        expected = selected(logits, routing)
        assert ids == list(expected)
        assert shares == pytest.approx(list(expected.values()), rel=1e-4)


@pytest.mark.parametrize("name", ROUTINGS)
def test_selection(name: str) -> None:
    torch.manual_seed(1)
    x, norm, weight = 3 * torch.randn(T, D), torch.rand(D) + 0.5, torch.randn(X, D) / D**0.5
    check(ops.route(x, norm, EPS, weight, ROUTINGS[name]), x, norm, weight, name)


def test_logits_of_16_bits_are_not_rounded() -> None:
    """Two experts whose logits differ by less than bfloat16 can tell apart."""
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    weight = torch.tensor([[1.0, 0.0], [1.0, 2.0**-9]], dtype=torch.bfloat16)
    for own in (weight, weight.float()):
        assert ops.route(x, torch.ones(2).bfloat16(), 0.0, own, Routing(1))[1].tolist() == [[1]]


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf")])
def test_experts_are_distinct_whatever_the_numbers(fill: float) -> None:
    for routing in ROUTINGS.values():
        _, ids, _ = ops.route(torch.full((2, D), fill), torch.ones(D), EPS, torch.ones(X, D), routing)
        assert all(len(set(row)) == routing.num_chosen and set(row) <= set(range(X)) for row in ids.tolist())


@pytest.mark.parametrize("name", ROUTINGS)
def test_given_experts(name: str) -> None:
    """Those that are selected anyway have the same shares; others have their own, and some rows are given none."""
    routing = ROUTINGS[name]
    torch.manual_seed(1)
    x, norm, weight = torch.randn(T, D), torch.rand(D) + 0.5, torch.randn(X, D) / D**0.5
    check_given(ops.route, x, norm, weight, routing)


def check_given(route: Any, x: Tensor, norm: Tensor, weight: Tensor, routing: Routing) -> None:
    _, ids, shares = route(x, norm, EPS, weight, routing, torch.full((T, routing.num_chosen), -1, device=x.device))
    _, same_ids, same_shares = route(x, norm, EPS, weight, routing, ids)
    assert torch.equal(same_ids, ids)
    assert torch.equal(same_shares, shares)
    other = (ids + 1) % X
    other[3] = -1
    _, found, other_shares = route(x, norm, EPS, weight, routing, other)
    assert torch.equal(found[3], ids[3])
    assert torch.equal(other_shares[3], shares[3])
    kept = torch.arange(T) != 3
    assert torch.equal(found[kept], other[kept])
    whole = routing._replace(num_chosen=X, normalises=False, groups=(1, 1), scale=1.0)
    _, all_ids, all_scores = route(x, norm, EPS, weight, whole)
    scores = torch.zeros_like(all_scores).scatter_(1, all_ids, all_scores).gather(1, found)
    if routing.normalises:
        scores = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(other_shares, scores * routing.scale, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routes_are_kept_by_slot(dtype: torch.dtype) -> None:
    check_kept(ops.keep_routes, dtype, "cpu")


def check_kept(keep_routes: Any, dtype: torch.dtype, device: str) -> None:
    """Of two of three layers, for rows of which one is padding."""
    ids = torch.arange(2 * 4 * 3, device=device).view(2, 4, 3)
    table = torch.zeros(6, 9, dtype=dtype, device=device)
    slots = torch.tensor([5, -1, 0, 2], device=device)
    keep_routes(ids, torch.tensor([0, 6], device=device), slots, table)
    expected = torch.zeros(6, 9, dtype=dtype)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot, :3], expected[slot, 6:] = ids[0, t].cpu().to(dtype), ids[1, t].cpu().to(dtype)
    assert torch.equal(table.cpu(), expected)
