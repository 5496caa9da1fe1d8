"""Low-rank changes row by row: against float64, blind to unused places, leaving all other rows alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops import stacked_lora as dispatched
from octavo.ops.linear.linear import NO_ADAPTER, LowRankStack
from octavo_kernels.triton.launch import invariant
from octavo_kernels.triton.linear import stacked_lora as module
from octavo_kernels.triton.linear.stacked_lora import stacked_lora_triton

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PLACES = 5
NAN = float("nan")


def make_stack(
    sizes: list[int], K: int, R: int, dtype: torch.dtype, device: str, used: tuple[int, ...] = (0, 3, 4)
) -> LowRankStack:
    """Parts side by side with a gap of three outputs behind the first; places that are not used hold NaN."""
    starts = [0, *(sum(sizes[:i]) + 3 for i in range(1, len(sizes)))]
    N = starts[-1] + sizes[-1] + 2
    down, up = torch.full((PLACES, len(sizes), R, K), NAN), torch.full((PLACES, N, R), NAN)
    for place in used:
        down[place], up[place] = torch.randn(len(sizes), R, K) * K**-0.5, torch.randn(N, R) * R**-0.5
    parts = torch.tensor(list(zip(starts, sizes, strict=True)), dtype=torch.int32, device=device)
    return LowRankStack(down.to(device, dtype), up.to(device, dtype), parts, max(sizes))


def expected(y_TN: Tensor, x_TK: Tensor, places: list[int], stack: LowRankStack) -> Tensor:
    wanted = y_TN.double()
    for row, place in enumerate(places):
        if place >= 0:
            for part, (start, size) in enumerate(stack.parts_P2.tolist()):
                low_R = stack.down_APRK[place, part].double() @ x_TK[row].double()
                wanted[row, start : start + size] += stack.up_ANR[place, start : start + size].double() @ low_R
    return wanted


def check(places: list[int], sizes: list[int], K: int, R: int, device: str, dtype: torch.dtype = torch.float32) -> None:
    stack = make_stack(sizes, K, R, dtype, device)
    T, N = len(places), stack.up_ANR.shape[1]
    wide = torch.full((T, N + 5), NAN, dtype=dtype, device=device)  # y is columns of wider rows
    wide[:, :N] = torch.randn(T, N).to(device, dtype)
    x_TK, y_TN = torch.randn(T, K + 3).to(device, dtype)[:, :K], wide[:, :N]
    x_TK[[row for row, place in enumerate(places) if place < 0]] = NAN
    before, wanted = wide.clone(), expected(y_TN, x_TK, places, stack)
    found = stacked_lora_triton(y_TN, x_TK, torch.tensor(places, dtype=torch.int32, device=device), stack)
    assert found.data_ptr() == y_TN.data_ptr()
    error = (found.double() - wanted).abs() / wanted.abs().clamp(min=1)
    assert error.max() < TOLERANCE[dtype], f"largest error {error.max()}"
    is_changed = torch.zeros_like(wide, dtype=torch.bool)
    for row, place in enumerate(places):
        for start, size in stack.parts_P2.tolist() if place >= 0 else ():
            is_changed[row, start : start + size] = True
    assert torch.equal(wide[~is_changed].view(torch.uint8), before[~is_changed].view(torch.uint8))
    assert not torch.equal(wide[is_changed], before[is_changed]) or not is_changed.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "places", [[3], [0, NO_ADAPTER, 3, 3, NO_ADAPTER, 0, 4], [4, 0] * 9 + [NO_ADAPTER] * 3 + [3] * 14]
)
def test_rows_of_several_adapters_and_none(places: list[int], dtype: torch.dtype, device: str) -> None:
    check(places, [40], 96, 8, device, dtype)


@pytest.mark.parametrize("sizes", [[17], [130], [64, 16, 16], [3, 150, 40]])
def test_parts(sizes: list[int], device: str) -> None:
    check([0, NO_ADAPTER, 4, 3], sizes, 80, 4, device)


@pytest.mark.parametrize(("K", "R"), [(16, 1), (70, 16), (64, 21), (700, 70), (640, 8)])
def test_inputs_and_ranks(K: int, R: int, device: str) -> None:
    """One chunk of inputs, part of one, several splits; ranks that fill no tile, one, or two."""
    check([3, 4, NO_ADAPTER], [24, 24], K, R, device)


def test_many_rows(device: str) -> None:
    check([3] * 70 + [NO_ADAPTER] * 20 + [0] * 50, [32], 64, 8, device)


def test_no_row_has_an_adapter(device: str) -> None:
    check([NO_ADAPTER] * 20, [32], 64, 8, device)


def test_a_step_without_rows(device: str) -> None:
    stack = make_stack([32], 64, 8, torch.float32, device)
    nothing = torch.zeros(0, 34, device=device)
    places = torch.zeros(0, dtype=torch.int32, device=device)
    assert stacked_lora_triton(nothing, torch.zeros(0, 64, device=device), places, stack) is nothing


def test_a_rows_bits_do_not_depend_on_the_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW_ROWS", 20)
    stack = make_stack([48, 16], 600, 8, torch.float32, device)
    x_TK, y_TN = torch.randn(50, 600, device=device), torch.randn(50, stack.up_ANR.shape[1], device=device)
    places = torch.tensor([0, 3, NO_ADAPTER, 4, 3] * 10, dtype=torch.int32, device=device)
    with invariant():
        together = stacked_lora_triton(y_TN.clone(), x_TK, places, stack)
        for row in (0, 1, 17, 49):
            alone = stacked_lora_triton(
                y_TN[row : row + 1].clone(), x_TK[row : row + 1], places[row : row + 1].clone(), stack
            )
            assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_does_the_same(dtype: torch.dtype) -> None:
    stack = make_stack([40, 8], 64, 4, dtype, "cpu")
    places = [0, NO_ADAPTER, 3, 3, 4]
    x_TK, y_TN = torch.randn(5, 64).to(dtype), torch.randn(5, stack.up_ANR.shape[1]).to(dtype)
    wanted = expected(y_TN, x_TK, places, stack)
    found = dispatched.reference(y_TN, x_TK, torch.tensor(places, dtype=torch.int32), stack)
    torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
