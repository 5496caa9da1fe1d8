"""The router on the device: one launch for few rows, more for many, and the same selection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.moe import Routing, local_expert_ids
from octavo.ops.norms import rms_norm
from octavo_kernels.triton.experts.route import FEW_ROWS, keep_routes_triton, local_expert_ids_triton, route_triton
from octavo_kernels.triton.launch import invariant
from tests.ops.test_route import EPS, ROUTINGS, D, X, check, check_given, check_kept
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in

ROWS = [1, 5, FEW_ROWS + 11]


def on(device: str, routing: Routing) -> Routing:
    vectors = {name: getattr(routing, name) for name in ("bias_X", "correction_X")}
    return routing._replace(**{name: None if v is None else v.to(device) for name, v in vectors.items()})


def numbers(T: int, D: int, X: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, norm and weight."""
    torch.manual_seed(T)
    made = 3 * torch.randn(T, D), torch.rand(D) + 0.5, torch.randn(X, D) / D**0.5
    x, norm, weight = (tensor.to(device, dtype) for tensor in made)
    return x, norm, weight


@one_in(4)
@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("T", ROWS)
def test_selection(T: int, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    x, norm, weight = numbers(T, D, X, torch.float32, device)
    for _ in range(2):  # the counters are zero again
        check(route_triton(x, norm, EPS, weight, on(device, ROUTINGS[name])), x, norm, weight, name)


@one_in(5)
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [("bfloat16", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize("T", ROWS)
def test_types_and_uneven_sizes(T: int, x_dtype: str, weight_dtype: str, device: str) -> None:
    """More columns than a block, and numbers of experts that are no power of two."""
    x, norm, weight = numbers(T, 2500, 45, getattr(torch, weight_dtype), device)
    x, norm = (tensor.to(getattr(torch, x_dtype)) for tensor in (x, norm))
    routing = Routing(6, normalises=True)
    normed, ids, shares = route_triton(x, norm, EPS, weight, routing)
    torch.testing.assert_close(normed, rms_norm.reference(x, norm, EPS))
    scores, expected_ids = (normed.float() @ weight.float().T).softmax(1).topk(6)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, scores / scores.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("T", ROWS)
def test_of_equals_the_first(T: int, device: str) -> None:
    equal = torch.ones(T, D, device=device), torch.ones(D, device=device), EPS, torch.ones(X, D, device=device)
    _, ids, shares = route_triton(*equal, Routing(3, normalises=True))
    assert ids.tolist() == [[0, 1, 2]] * T
    torch.testing.assert_close(shares, torch.full((T, 3), 1 / 3, device=device))
    assert route_triton(*equal, Routing(3, groups=(4, 2)))[1].tolist() == [[0, 1, 2]] * T


@pytest.mark.parametrize("fill", [float("nan"), float("-inf")])
@pytest.mark.parametrize("T", [1, FEW_ROWS + 1])
def test_experts_are_distinct_whatever_the_numbers(T: int, fill: float, device: str) -> None:
    norm, weight = torch.ones(D, device=device), torch.ones(X, D, device=device)
    for routing in ROUTINGS.values():
        for count in (D, 1):  # of all columns, or of one
            x = torch.ones(T, D, device=device)
            x[:, :count] = fill
            _, ids, _ = route_triton(x, norm, EPS, weight, on(device, routing))
            assert all(len(set(row)) == routing.num_chosen and set(row) <= set(range(X)) for row in ids.tolist())


def test_invariant_rows_do_not_depend_on_their_number(device: str) -> None:
    x, *weights = numbers(70, 40, 12, torch.float32, device)
    with invariant():
        whole = route_triton(x, weights[0], EPS, weights[1], Routing(3))
        for T in (1, 9, 65):
            some = route_triton(x[:T], weights[0], EPS, weights[1], Routing(3))
            assert all(torch.equal(own, of_all[:T]) for own, of_all in zip(some, whole, strict=True))


def test_no_rows(device: str) -> None:
    norm, weight = torch.ones(D, device=device), torch.ones(X, D, device=device)
    _, ids, shares = route_triton(torch.empty(0, D, device=device), norm, EPS, weight, Routing(3))
    assert ids.shape == shares.shape == (0, 3)


@pytest.mark.parametrize("name", ROUTINGS)
def test_given_experts(name: str, device: str) -> None:
    x, norm, weight = numbers(9, D, X, torch.float32, device)
    with invariant():  # rows with and without given experts by the same kernels
        check_given(route_triton, x, norm, weight, on(device, ROUTINGS[name]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_routes_are_kept_by_slot(dtype: torch.dtype, device: str) -> None:
    check_kept(keep_routes_triton, dtype, device)


@pytest.mark.parametrize("T", [0, 1, 130])
def test_experts_are_found_where_they_are(T: int, device: str) -> None:
    ids, slots = torch.randint(-1, 9, (T, 4)), torch.randint(-1, 5, (9, 3))
    expected = [[slots[e, t % 3].item() if e >= 0 else -1 for e in row] for t, row in enumerate(ids.tolist())]
    for run in (local_expert_ids_triton, local_expert_ids.reference):
        load = torch.arange(9, device=device)
        for counted in (load, None):
            assert run(ids.to(device), slots.to(device), counted).tolist() == expected
        assert load.tolist() == (torch.arange(9) + ids[ids >= 0].bincount(minlength=9)).tolist()
