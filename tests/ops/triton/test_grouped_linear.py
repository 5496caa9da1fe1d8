"""Linear maps of packed groups against float64: every kernel, format and part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import PackedGroups, grouped_linear
from octavo.ops.linear.linear import PLAIN, Fused
from octavo_kernels.triton import launch
from octavo_kernels.triton.config_tables import FOLDER, ConfigTable
from octavo_kernels.triton.grouped import grouped_configs, grouped_gemv
from octavo_kernels.triton.grouped.grouped_configs import TABLE, GroupedConfig, config_for
from octavo_kernels.triton.grouped.grouped_dense import dense
from octavo_kernels.triton.grouped.grouped_gemm import GroupedGemmConfig
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig
from octavo_kernels.triton.grouped.grouped_linear import grouped_linear_triton, run_grouped
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import counters, invariant
from octavo_kernels.triton.linear.skinny_gemm import MAX_TILES
from tests.ops.triton.poison import poison_new_tensors
from tests.ops.triton.test_linear import PARTS, Case
from tests.tiers import one_in

GEMM = GroupedGemmConfig(64, 16, warps=4, stages=2)
CONFIGS: dict[str, GroupedConfig] = {
    "gemv": GroupedGemvConfig(16, split=4, warps=4, stages=2),
    "gemv, more parts than warps": GroupedGemvConfig(32, split=8, warps=4, stages=3, release="late"),
    "gemm": GEMM,
    "gemm, splits": replace(GEMM, splits=3, release="late"),
    "dense": None,
}
FORMATS = {
    "int4, 16": ("int4", 16),
    "int4, 32": ("int4", 32),
    "int4, 64": ("int4", 64),
    "int4, 128": ("int4", 128),
    "int4, 256": ("int4", 256),
    "int4, per output": ("int4", 0),
    "uint4 with minima, 32": ("uint4", 32),
    "uint4 with minima, 128": ("uint4", 128),
    "int8, 16": ("int8", 16),
    "int8, 32": ("int8", 32),
    "int8, 128": ("int8", 128),
    "int8, per output": ("int8", 0),
    "e4m3, 128": ("e4m3", 128),
    "e4m3, per output": ("e4m3", 0),
    "e2m1, 16": ("e2m1", 16),
    "e2m1, 32": ("e2m1", 32),
}
"""Numbers and groups; 0 for a scale per output."""


def random_groups(
    device: str, number: str, N: int, K: int, group: int, zeros: bool = False, order: bool = False
) -> PackedGroups:
    """A random weight of about unit variance for rows of K."""
    if number == "e4m3":
        codes = torch.randn(N, K, device=device).mul(20).to(torch.float8_e4m3fn).view(torch.uint8)
    elif number in ("e2m1", "uint4"):
        codes = torch.randint(0, 16, (N, K), device=device, dtype=torch.uint8)
    else:
        top = 8 if number == "int4" else 128
        codes = torch.randint(-top, top, (N, K), device=device, dtype=torch.int8)
    unit = {"int4": 5, "uint4": 5, "int8": 70, "e4m3": 20, "e2m1": 3}[number]
    scales = (torch.rand(N, K // (group or K), device=device) + 0.5) / unit / K**0.5
    zeros_NG = torch.randint(-7, 8, scales.shape, device=device, dtype=torch.int8) if zeros else None
    order_K = torch.randperm(K, device=device) if order else None
    minima_NG = (-7 * scales).half().float() if number == "uint4" else None
    return PackedGroups.pack(number, codes, scales.bfloat16().float(), zeros_NG, order_K, minima_NG)


@dataclass
class GroupedCase:
    """The arguments of one call: those of a dense one, with another weight."""

    case: Case
    packed: PackedGroups

    @classmethod
    def random(
        cls, device: str, T: int, packed: PackedGroups, dtype: torch.dtype = torch.bfloat16, **parts: Any
    ) -> GroupedCase:
        case = Case.random(device, T, *packed.shape, dtype, **parts)
        case.weight_NK = packed.unpack()
        return cls(case, packed)

    def arguments(self) -> tuple[Any, ...]:
        x, _, *rest = self.case.arguments()
        return x, self.packed, *rest

    def check(self, out_TN: Tensor) -> None:
        self.case.check(out_TN)


def after_attention(
    attended: Tensor, x: Tensor, norm: Tensor, output: PackedGroups, gate_up: PackedGroups, down: PackedGroups
) -> Tensor:
    """The output projection, and the feed-forward part, in float64 but for roundings to bfloat16 between products."""
    wide = (x.double() + attended.double() @ output.unpack().double().T).bfloat16().double()
    normed = wide * torch.rsqrt(wide.square().mean() + 1e-6) * norm.double()
    gates, ups = (normed @ gate_up.unpack().double().T).chunk(2, dim=1)
    inner = (torch.nn.functional.silu(gates) * ups).bfloat16().double()
    return wide + inner @ down.unpack().double().T


@pytest.fixture(autouse=True)
def _poison(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    counters(torch.device(device), MAX_TILES)
    poison_new_tensors(monkeypatch)


def rows_for(name: str) -> int:
    return 1 if "gemv" in name else 5


@one_in(5)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_with_all_parts(device: str, name: str, parts: dict[str, Any]) -> None:
    packed = random_groups(device, "int4", 46, 640, 128)
    for T in (1, 3) if "gemv" in name else (3,):
        case = GroupedCase.random(device, T, packed, **parts)
        case.check(run_grouped(*case.arguments(), CONFIGS[name]))


@one_in(7)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format(device: str, form: str, name: str) -> None:
    number, group = FORMATS[form]
    for zeros in (False, True) if number in ("int4", "int8") else (False,):
        packed = random_groups(device, number, 37, 768, group, zeros)
        case = GroupedCase.random(device, 2, packed)
        case.check(run_grouped(*case.arguments(), CONFIGS[name]))


@one_in(7)
@pytest.mark.parametrize(
    ("N", "K", "group"), [(1, 32, 32), (17, 96, 32), (16, 64, 64), (75, 33, 0), (2, 7, 0), (40, 192, 64)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_odd_shapes(device: str, name: str, N: int, K: int, group: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        case = GroupedCase.random(device, 1, random_groups(device, "int4", N, K, group), dtype, **PARTS["norm"])
        case.check(run_grouped(*case.arguments(), CONFIGS[name]))


@one_in(2)
@pytest.mark.parametrize("T", [1, 2, 8, 9, 16, 17, 70, 130, 260])
def test_rows_by_the_chosen_configuration(device: str, T: int) -> None:
    packed = random_groups(device, "int4", 70, 256, 128)
    for parts in (PARTS["norm and silu"], PARTS["bias and residual"]):
        case = GroupedCase.random(device, T, packed, **parts)
        case.check(grouped_linear_triton(*case.arguments()))


@one_in(3)
@pytest.mark.parametrize("number", ["int4", "uint4", "int8", "e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_is_exact(device: str, number: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    if number == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    elif number in ("e2m1", "uint4"):
        codes &= 15
    elif number == "int4":
        codes = (codes % 16).to(torch.int8) - 8
    packed = PackedGroups.pack(number, codes.repeat(3, 1), torch.ones(3, 1, device=device))  # type: ignore[arg-type]
    assert torch.equal(dense(packed, dtype).float(), packed.unpack())
    one_hot = torch.eye(256, device=device, dtype=dtype)
    for config in (CONFIGS["gemv"], CONFIGS["gemm"]):
        for rows in one_hot.split(8):
            found = run_grouped(rows, packed, PLAIN, config)
            assert torch.equal(found.float(), (rows.float() @ packed.unpack().T).to(dtype).float())


@pytest.mark.parametrize("name", CONFIGS)
def test_activation_order(device: str, name: str) -> None:
    packed = random_groups(device, "int4", 20, 256, 64, zeros=True, order=True)
    case = GroupedCase.random(device, 3, packed, **PARTS["norm"])
    case.check(run_grouped(*case.arguments(), CONFIGS[name]))


def test_splits_leave_their_counters_at_zero(device: str) -> None:
    case = GroupedCase.random(device, 5, random_groups(device, "int4", 150, 1024, 128))
    first, second = (run_grouped(*case.arguments(), CONFIGS["gemm, splits"]) for _ in range(2))
    assert torch.equal(first, second)
    assert not counters(torch.device(device), MAX_TILES).any()


@one_in(2)
@pytest.mark.parametrize("parts", [PARTS["norm and silu"], PARTS["bias and residual"]], ids=["gated", "residual"])
def test_invariant_rows_have_the_same_bits_in_any_company(
    device: str, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the splits of a tile go from several programs to one, for there are enough tiles."""
    monkeypatch.setattr(grouped_configs, "ENOUGH_PROGRAMS", 4)
    case = GroupedCase.random(device, 130, random_groups(device, "int4", 140, 2048, 128), **parts)
    with invariant():
        whole = grouped_linear_triton(*case.arguments())
        case.check(whole)
        x, packed, fused = case.arguments()
        for rows in (slice(0, 1), slice(3, 5), slice(2, 66)):
            own = None if fused.residual_TN is None else fused.residual_TN[rows].clone()
            found = grouped_linear_triton(x[rows], packed, fused._replace(residual_TN=own))
            assert torch.equal(found, whole[rows])


def test_the_reference_agrees(device: str) -> None:
    case = GroupedCase.random(device, 3, random_groups(device, "int8", 20, 128, 64, zeros=True), **PARTS["all"])
    case.check(grouped_linear.reference(*case.arguments()))


def test_rows_of_the_weight(device: str) -> None:
    packed = random_groups(device, "int4", 50, 256, 64, zeros=True, order=True)
    ids = torch.tensor([49, 3, 3, 16], device=device)
    assert torch.equal(packed.rows(ids), packed.unpack()[ids])


def test_no_rows(device: str) -> None:
    case = GroupedCase.random(device, 0, random_groups(device, "int4", 64, 128, 32), **PARTS["norm and silu"])
    assert grouped_linear_triton(*case.arguments()).shape == (0, 32)


@pytest.mark.parametrize(("K", "group"), [(192, 48), (384, 96), (64, 8)])
def test_groups_that_no_kernel_takes_are_refused(K: int, group: int) -> None:
    with pytest.raises(ValueError, match=f"groups of {group} of {K} inputs cannot be packed as int4"):
        PackedGroups.pack("int4", torch.zeros(4, K, dtype=torch.int8), torch.ones(4, K // group))


def test_what_does_not_go_together_is_refused(device: str) -> None:
    packed = random_groups(device, "int4", 5, 128, 32)
    with pytest.raises(ValueError, match="x has 64 columns, the weight 128"):
        grouped_linear_triton(torch.zeros(2, 64, device=device).bfloat16(), packed)
    with pytest.raises(ValueError, match="5 outputs cannot be gates and as many ups"):
        grouped_linear_triton(torch.zeros(2, 128, device=device).bfloat16(), packed, Fused(activation="silu"))


def test_a_device_uses_its_table(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = random_groups(device, "int4", 64, 256, 128)
    table = {"int4/128 64x256, 8": CONFIGS["gemv"], "int4/128 64x256, 32": None}
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: table)
    plain, gated = (GroupedProduct.of(packed, is_gated, torch.bfloat16) for is_gated in (False, True))
    found = [config_for(T, plain, torch.device("cpu")) for T in (2, 8, 17)]
    assert found == [CONFIGS["gemv"], CONFIGS["gemv"], None]
    assert isinstance(config_for(17, gated, torch.device("cpu")), GroupedGemmConfig)  # another product
    assert isinstance(config_for(1, plain, torch.device("cpu")), GroupedGemvConfig)
    for rows in (9, 200):
        assert isinstance(config_for(rows, plain, torch.device("cpu")), GroupedGemmConfig)


@pytest.mark.parametrize("release", ["early", "late", "never"])
def test_release_never_launches_without_overlap(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launches.append(options)

    monkeypatch.setattr(grouped_gemv, "grouped_gemv_kernel", Kernel())
    x, packed = torch.ones(1, 128).bfloat16(), random_groups("cpu", "int4", 32, 128, 32)
    token = launch._pdl.set(True)
    try:
        run_grouped(x, packed, PLAIN, GroupedGemvConfig(16, 4, 4, 2, release))
    finally:
        launch._pdl.reset(token)
    assert [options["PDL"] for options in launches] == [options["launch_pdl"] for options in launches]
    assert [options["PDL"] for options in launches] == [release != "never"]


def test_shipped_tables_can_be_read(tmp_path: Path) -> None:
    another = ConfigTable("another", TABLE.kinds)
    for path in FOLDER.glob("*.json"):
        found = TABLE.read(path)
        another.write(tmp_path / "gpu.json", {"1x1": CONFIGS["gemm"]})
        TABLE.write(tmp_path / "gpu.json", found)
        assert TABLE.read(tmp_path / "gpu.json") == found
        assert another.read(tmp_path / "gpu.json") == {"1x1": CONFIGS["gemm"]}
