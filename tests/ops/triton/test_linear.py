"""Linear maps against float64: every kernel, with all that may stand before and after the products."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.launch import counters, invariant
from octavo_kernels.triton.linear import invariant_linear
from octavo_kernels.triton.linear.gemv import GemvConfig
from octavo_kernels.triton.linear.linear import linear_triton, run_linear
from octavo_kernels.triton.linear.linear_configs import LinearConfig
from octavo_kernels.triton.linear.skinny_gemm import MAX_TILES, SkinnyConfig
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Of the largest result, for the roundings of the normed x, of gates and ups, and of the result (see test_rms_norm)."""
SKINNY = SkinnyConfig(64, 32, warps=4, stages=2)
CONFIGS: dict[str, LinearConfig] = {
    "gemv": GemvConfig(4, 64, warps=4),
    "gemv, late": GemvConfig(1, 4096, warps=4, release="late"),
    "walking gemv": GemvConfig(2, 64, warps=4, programs=1),
    "walking gemv, late": GemvConfig(8, 4096, warps=4, programs=1, release="late"),
    "walking gemv, stages": GemvConfig(2, 64, warps=4, programs=1, stages=3),
    "skinny": SKINNY,
    "skinny, norm": replace(SKINNY, fuses_norm=True),
    "skinny, splits": replace(SKINNY, splits=3),
    "skinny, norm, splits": replace(SKINNY, fuses_norm=True, splits=3),
    "skinny, copy engine": replace(SKINNY, copy_engine=True, splits=2, release="late"),
    "cublas": None,
}
PARTS = {
    "plain": {},
    "bias": {"bias_N": True},
    "norm": {"norm_K": True},
    "residual": {"residual_TN": True},
    "bias and residual": {"bias_N": True, "residual_TN": True},
    "norm and silu": {"norm_K": True, "activation": "silu"},
    "all": {"norm_K": True, "bias_N": True, "activation": "gelu", "residual_TN": True},
    "bias and gelu_tanh": {"bias_N": True, "activation": "gelu_tanh"},
}
EPS = 1e-5


@dataclass
class Case:
    """The arguments of one call."""

    x_TK: Tensor
    weight_NK: Tensor
    bias_N: Tensor | None = None
    norm_K: Tensor | None = None
    residual_TN: Tensor | None = None
    activation: Any = None

    @classmethod
    def random(cls, device: str, T: int, N: int, K: int, dtype: torch.dtype, **parts: Any) -> Case:
        def fresh(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        outputs = N // 2 if "activation" in parts else N
        shapes = {"bias_N": (N,), "norm_K": (K,), "residual_TN": (T, outputs)}
        given = {name: fresh(*shapes[name]) if value is True else value for name, value in parts.items()}
        return cls(fresh(T, K) * 2, fresh(N, K) / K**0.5, **given)

    def arguments(self) -> tuple[Any, ...]:
        residual = None if self.residual_TN is None else self.residual_TN.clone()
        return self.x_TK, self.weight_NK, Fused(self.bias_N, self.norm_K, EPS, residual, self.activation)

    def expected(self) -> Tensor:
        x, weight = self.x_TK.double(), self.weight_NK.double()
        if self.norm_K is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm_K.double()
        y = x @ weight.T + (0 if self.bias_N is None else self.bias_N.double())
        if self.activation is not None:
            gate, up = y.chunk(2, dim=-1)
            form = "tanh" if self.activation == "gelu_tanh" else "none"
            y = (functional.silu(gate) if self.activation == "silu" else functional.gelu(gate, approximate=form)) * up
        return y if self.residual_TN is None else y + self.residual_TN.double()

    def check(self, out_TN: Tensor) -> None:
        expected = self.expected()
        assert out_TN.dtype == self.x_TK.dtype
        allowed = TOLERANCE[out_TN.dtype]
        torch.testing.assert_close(out_TN.double(), expected, rtol=allowed, atol=allowed * expected.abs().max().item())


@pytest.fixture(autouse=True)
def _poison(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    counters(torch.device(device), MAX_TILES)
    poison_new_tensors(monkeypatch)


@one_in(7)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_with_all_parts(device: str, name: str, parts: dict[str, Any]) -> None:
    T, N = (1, 46) if "gemv" in name else (5, 158)
    case = Case.random(device, T, N, 200, torch.bfloat16, **parts)
    case.check(run_linear(*case.arguments(), CONFIGS[name]))


@one_in(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 3, 8, 16, 17, 64, 65, 130])
def test_rows_and_types(device: str, T: int, dtype: torch.dtype) -> None:
    for parts in (PARTS["norm"], PARTS["norm and silu"], PARTS["bias and residual"]):
        case = Case.random(device, T, 70, 96, dtype, **parts)
        case.check(linear_triton(*case.arguments()))


@pytest.mark.parametrize(("N", "K"), [(1, 1), (2, 7), (75, 33), (16, 1024), (67, 64)])
@pytest.mark.parametrize("T", [1, 4])
def test_odd_shapes(device: str, T: int, N: int, K: int) -> None:
    for parts in (PARTS["plain"], PARTS["norm"], PARTS["bias and residual"]):
        case = Case.random(device, T, N, K, torch.float16, **parts)
        case.check(linear_triton(*case.arguments()))


def test_strided_arguments(device: str) -> None:
    case = Case.random(device, 3, 64, 96, torch.float16, **PARTS["residual"])
    case.x_TK = torch.randn(3, 200, device=device).half()[:, 7:103]
    case.weight_NK = case.weight_NK.T.contiguous().T
    case.check(linear_triton(*case.arguments()))


def test_the_copy_engine_is_not_asked_for_what_it_cannot_fetch(device: str) -> None:
    case = Case.random(device, 3, 64, 97, torch.bfloat16)
    case.check(run_linear(*case.arguments(), CONFIGS["skinny, copy engine"]))


def test_float16_norms_of_large_values_do_not_overflow(device: str) -> None:
    case = Case.random(device, 4, 64, 64, torch.float16, **PARTS["norm"])
    case.x_TK *= 8000
    assert case.norm_K is not None
    case.norm_K *= 4
    case.check(run_linear(*case.arguments(), CONFIGS["skinny, norm"]))


@one_in(3)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("splits", [1, 2])
def test_rows_in_several_tiles(device: str, splits: int, parts: dict[str, Any]) -> None:
    case = Case.random(device, 43, 158, 200, torch.bfloat16, **parts)
    case.check(run_linear(*case.arguments(), replace(SKINNY, block_t=16, splits=splits)))


def test_splits_leave_their_counters_at_zero(device: str) -> None:
    case = Case.random(device, 5, 158, 200, torch.bfloat16)
    first, second = (run_linear(*case.arguments(), CONFIGS["skinny, splits"]) for _ in range(2))
    assert torch.equal(first, second)
    assert not counters(torch.device(device), MAX_TILES).any()


@one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [PARTS["norm and silu"], PARTS["bias and residual"]], ids=["gated", "residual"])
def test_invariant_rows_have_the_same_bits_in_any_company(
    device: str, parts: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the splits of a tile go from several programs to one, for there are enough tiles."""
    monkeypatch.setattr(invariant_linear, "MOST_BYTES", 1 << 18)
    case = Case.random(device, 200, 150, 1024, dtype, **parts)
    if dtype == torch.bfloat16:
        is_gated = parts.get("activation") is not None
        shape = 75 if is_gated else 150, 1024, dtype, is_gated
        assert [invariant_linear.invariant_tiles(T, *shape).in_turn for T in (1, 200)] == [False, True]
    with invariant():
        together = linear_triton(*case.arguments())
        for T in (1, 3, 65):
            picked = torch.randperm(200)[:T].to(device)
            few = replace_rows(case, picked)
            apart = linear_triton(*few.arguments())
            assert torch.equal(together[picked], apart)
            few.check(apart)


def replace_rows(case: Case, rows: Tensor) -> Case:
    residual = None if case.residual_TN is None else case.residual_TN[rows]
    return replace(case, x_TK=case.x_TK[rows], residual_TN=residual)


def test_no_rows(device: str) -> None:
    case = Case.random(device, 0, 64, 32, torch.float16, **PARTS["norm and silu"])
    assert linear_triton(*case.arguments()).shape == (0, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_NK": torch.zeros(4, 9)}, "x is 8 columns of torch.float32, the weight 9 of torch.float32"),
        ({"weight_NK": torch.zeros(4, 8).half()}, "the weight 8 of torch.float16"),
        (
            {"weight_NK": torch.zeros(5, 8), "fused": Fused(activation="silu")},
            "5 outputs cannot be gates and as many",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_triton(**{"x_TK": torch.zeros(2, 8), "weight_NK": torch.zeros(4, 8), **change})
