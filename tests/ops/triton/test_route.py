"""The router on the device: the selection of ``tests/ops/test_route.py``, by one launch for few rows and two for many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.route import Routing, route
from octavo.ops.triton.launch import invariant
from octavo.ops.triton.route import FEW_ROWS, route_triton
from tests.ops.test_route import ROUTINGS, D, X, check
from tests.ops.triton.poison import poison_new_tensors

ROWS = [1, 5, FEW_ROWS + 11]


def on(device: str, routing: Routing) -> Routing:
    vectors = {name: getattr(routing, name) for name in ("bias_X", "correction_X")}
    return routing._replace(**{name: None if v is None else v.to(device) for name, v in vectors.items()})


def numbers(T: int, D: int, X: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(T)
    return torch.randn(T, D).to(device, dtype), (torch.randn(X, D) / D**0.5).to(device, dtype)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("T", ROWS)
def test_selection(T: int, name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)
    x, weight = numbers(T, D, X, torch.float32, device)
    routing = on(device, ROUTINGS[name])
    for _ in range(2):  # the counters are zero again
        check(*(found.cpu() for found in route_triton(x, weight, routing)), x.cpu(), weight.cpu(), ROUTINGS[name])


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [("bfloat16", "bfloat16"), ("float16", "float32")])
@pytest.mark.parametrize("T", ROWS)
def test_types_and_uneven_sizes(T: int, x_dtype: str, weight_dtype: str, device: str) -> None:
    """More columns than a block, and numbers of experts that are no power of two."""
    x, weight = numbers(T, 2500, 45, getattr(torch, weight_dtype), device)
    x = x.to(getattr(torch, x_dtype))
    routing = Routing(6, normalises=True)
    expected_ids, expected_shares = route.reference(x.float(), weight.float(), routing)
    ids, shares = route_triton(x, weight, routing)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(shares, expected_shares, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("T", ROWS)
def test_of_equals_the_first(T: int, device: str) -> None:
    x, weight = torch.ones(T, D, device=device), torch.ones(X, D, device=device)
    ids, shares = route_triton(x, weight, Routing(3, normalises=True))
    assert ids.tolist() == [[0, 1, 2]] * T
    torch.testing.assert_close(shares, torch.full((T, 3), 1 / 3, device=device))
    assert route_triton(x, weight, Routing(3, groups=(4, 2)))[0].tolist() == [[0, 1, 2]] * T


@pytest.mark.parametrize("fill", [float("nan"), float("-inf")])
@pytest.mark.parametrize("T", [1, FEW_ROWS + 1])
def test_experts_are_distinct_whatever_the_numbers(T: int, fill: float, device: str) -> None:
    weight = torch.ones(X, D, device=device)
    for routing in ROUTINGS.values():
        for count in (D, 1):  # of all columns, or of one
            x = torch.ones(T, D, device=device)
            x[:, :count] = fill
            ids, _ = route_triton(x, weight, on(device, routing))
            assert all(len(set(row)) == routing.num_chosen and set(row) <= set(range(X)) for row in ids.tolist())


def test_invariant_rows_do_not_depend_on_their_number(device: str) -> None:
    x, weight = numbers(70, 40, 12, torch.float32, device)
    with invariant():
        ids, shares = route_triton(x, weight, Routing(3))
        for T in (1, 9, 65):
            some_ids, some = route_triton(x[:T], weight, Routing(3))
            assert torch.equal(some, shares[:T])
            assert torch.equal(some_ids, ids[:T])


def test_no_rows(device: str) -> None:
    ids, shares = route_triton(torch.empty(0, D, device=device), torch.ones(X, D, device=device), Routing(3))
    assert ids.shape == shares.shape == (0, 3)
