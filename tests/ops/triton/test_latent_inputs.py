"""What latent attention takes, made in one kernel from the projections, against the same in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.attention.latent_attention import LatentHeads
from octavo_kernels.triton.attention.latent_inputs import latent_inputs
from octavo_kernels.triton.launch import invariant
from octavo_kernels.triton.linear import head_linear as module
from tests.ops.triton.poison import poison_new_tensors

NAN = float("nan")
ROUNDING = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float8_e4m3fn: 2**-3}
BLOCK_SIZE = 16


class Case:
    """Rows of wider tensors, some of them padding, and a cache that is NaN."""

    def __init__(
        self,
        device: str,
        T: int = 9,
        N: int = 3,
        P: int = 24,
        R: int = 8,
        L: int = 40,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.N, self.P, self.R, self.L = N, P, R, L
        self.q = torch.randn(T, N * (P + 2 * R) + 8).to(device, dtype)[:, :-8]
        self.kv = torch.randn(T, L + 2 * R + 8).to(device, dtype)[:, :-8]
        key_map, norm = torch.randn(N, L, P) * P**-0.5, torch.randn(L)
        no_values = torch.empty(N, 0, L, device=device, dtype=dtype)
        self.heads = LatentHeads(key_map.to(device, dtype), no_values, norm.to(device, dtype), 1e-5, 1.0)
        self.angles = (torch.rand(T, R) * 6).to(device)
        blocks = T // BLOCK_SIZE + 2
        self.cache = torch.full((blocks, 1, BLOCK_SIZE, 2 * R + L), NAN).to(device, cache_dtype or dtype)
        self.slots = torch.randperm(blocks * BLOCK_SIZE)[:T].to(device)
        self.slots[2::5] = -1

    def run(self, rows: slice = slice(None)) -> Tensor:
        tables = self.angles.cos()[rows], self.angles.sin()[rows]
        return latent_inputs(self.q[rows], self.kv[rows], self.heads, *tables, self.cache, self.slots[rows])

    def turned(self, x_TNR: Tensor) -> Tensor:
        first, second = x_TNR.double().chunk(2, -1)
        cos, sin = self.angles.double().cos()[:, None], self.angles.double().sin()[:, None]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def check(self) -> None:
        """Queries, what the slots of rows hold, and that no other slot was touched."""
        found = self.run()
        q_TNQ = self.q.unflatten(1, (self.N, -1))
        mapped = torch.einsum("tnp,nlp->tnl", q_TNQ[..., : self.P].double(), self.heads.key_map_NLP.double())
        assert_rounded(found, torch.cat((self.turned(q_TNQ[..., self.P :]), mapped), -1))
        latent, rotated = self.kv[:, : self.L].double(), self.turned(self.kv[:, None, self.L :])[:, 0]
        rms = (latent.square().mean(1, keepdim=True) + self.heads.norm_eps).sqrt()
        wanted = torch.cat((rotated, latent / rms * self.heads.norm_L.double()), -1)
        stored, by_slot = self.slots >= 0, self.cache.float().flatten(0, 2)
        assert_rounded(by_slot[self.slots[stored]].to(self.cache.dtype), wanted[stored])
        others = torch.ones(len(by_slot), dtype=torch.bool, device=by_slot.device)
        others[self.slots[stored]] = False
        assert by_slot[others].isnan().all(), "a slot of no row was written"


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """Right up to the rounding of its dtype, and of sums in float32."""
    error = (found.double() - wanted).abs() - wanted.abs() * ROUNDING[found.dtype]
    assert error.max() < (2e-3 if found.dtype == torch.float8_e4m3fn else 1e-5), f"largest error {error.max()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 9, 33, 70])
def test_queries_and_keys(T: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tiles of one, two and more programs, and where cuBLAS maps the queries."""
    poison_new_tensors(monkeypatch)
    monkeypatch.setattr(module, "MOST_IN_TILES", 40)
    Case(device, T, dtype=dtype).check()


@pytest.mark.parametrize(("N", "P", "R", "L"), [(1, 128, 32, 512), (5, 16, 3, 24), (2, 40, 5, 300), (3, 24, 0, 40)])
def test_sizes_of_heads(N: int, P: int, R: int, L: int, device: str) -> None:
    Case(device, 19, N, P, R, L, dtype=torch.bfloat16).check()


def test_float8_cache(device: str) -> None:
    Case(device, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn).check()


def test_no_rows(device: str) -> None:
    Case(device).run(slice(0, 0))


def test_rows_are_the_same_in_any_company_where_asked_for(device: str) -> None:
    case = Case(device, 300)
    with invariant():
        whole, stored = case.run(), case.cache.clone()
        case.cache.fill_(NAN)
        parts = [case.run(slice(0, 1)), case.run(slice(1, 80)), case.run(slice(80, 300))]
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(case.cache.view(torch.int32), stored.view(torch.int32))
