"""The PTX that unpacks words, instruction by instruction; kernels run it on GPUs only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.ops.linear.grouped_linear import BITS, WORDS, PackedGroups
from octavo_kernels.triton.grouped import grouped_numbers
from octavo_kernels.triton.grouped.grouped_numbers import (
    SUM_FACTOR,
    assembly,
    entry_assembly,
    entry_offset,
    int8_of_two,
    offset_of,
    pairs_of_e4m3,
    scale_factor,
)
from tests.ops.triton.ptx import Registers, halves, packed
from tests.ops.triton.test_grouped_linear import random_groups

N, K, GROUP = 32, 256, 32
FLOATS = (torch.bfloat16, torch.float16)
FORMS = [
    (number, zeros, minima)
    for number in ("int4", "uint4", "int8", "e4m3", "e2m1")
    for zeros in ((False, True) if "int" in number else (False,))
    for minima in ((False, True) if number in ("uint4", "int8") else (False,))
]


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(grouped_numbers, "has_assembly", lambda device: True)


def weight_of(number: str, zeros: bool, minima: bool, group: int = GROUP) -> PackedGroups:
    weight = replace(random_groups("cpu", number, N, K, group, zeros), minima_GN=None)
    return replace(weight, minima_GN=torch.randn(K // GROUP, N) / K) if minima else weight


def words_of(weight: PackedGroups) -> torch.Tensor:
    """Registers [N, chunks, 16], of two neighbouring words each."""
    words = weight.words.transpose(1, 2).flatten(0, 1).long() & 0xFFFF
    return words[..., ::2] | words[..., 1::2] << 16


def twice(values_NC: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """A number for each row and chunk, in both halves of registers [N, chunks, 1]."""
    return packed(values_NC[..., None, None].expand(*values_NC.shape, 1, 2), kind)


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize(("number", "zeros", "minima"), FORMS)
def test_entries_are_rounded_once(number: str, zeros: bool, minima: bool, kind: torch.dtype) -> None:
    weight = weight_of(number, zeros, minima)
    for offset in {0, entry_offset(weight) if kind == torch.bfloat16 else 0}:
        texts = entry_assembly(weight, kind, offset)
        assert texts is not None
        found = entries_by(weight, texts, kind, offset)
        scales = weight.scales_GN.to(kind).double()
        plain = replace(weight, scales_GN=torch.ones_like(weight.scales_GN), minima_GN=None).unpack().double()
        expected = plain.view(N, -1, GROUP) * scales.T[..., None]
        if weight.minima_GN is not None:
            expected += weight.minima_GN.to(kind).double().T[..., None]
        factor = SUM_FACTOR.value if scale_factor(weight, kind) != 1 else 1
        assert torch.equal(found * factor, expected.flatten(1).to(kind).double())


@pytest.mark.parametrize("number", ["e4m3", "e2m1"])
@pytest.mark.parametrize("scale", [2.0**-90, 2.0**17])
def test_entries_have_scales_of_any_size(number: str, scale: float) -> None:
    """One multiplication makes up for the exponents' offset, too."""
    weight = weight_of(number, False, False)
    weight = replace(weight, scales_GN=torch.full_like(weight.scales_GN, scale))
    texts = entry_assembly(weight, torch.bfloat16)
    assert texts is not None
    assert scale_factor(weight, torch.bfloat16) != 1
    found = entries_by(weight, texts, torch.bfloat16, 0) * SUM_FACTOR.value
    assert torch.equal(found, weight.unpack().double())


def entries_by(weight: PackedGroups, texts: tuple[str, ...], kind: torch.dtype, offset: int) -> torch.Tensor:
    """What these instructions make of a weight, float64 [N, K]."""
    words, planes = words_of(weight), []
    for plane, text in enumerate(texts):
        groups = torch.arange(words.shape[1]) * len(texts) + plane
        operands = [words]
        scales_GN = weight.scales_GN.double() * scale_factor(weight, kind)
        for values_GN, more in ((weight.zeros_GN, offset), (scales_GN, 0), (weight.minima_GN, 0)):
            operands.append(words if values_GN is None else twice(values_GN.T[:, groups].double() + more, kind))
        planes.append(halves(Registers(operands).run(text), kind).flatten(2))
    return torch.stack(planes, dim=2).flatten(1)


@pytest.mark.parametrize("kind", FLOATS, ids=str)
@pytest.mark.parametrize("number", BITS)
def test_numbers_are_exact(number: str, kind: torch.dtype) -> None:
    weight = weight_of(number, False, False)
    ones = replace(weight, scales_GN=torch.ones_like(weight.scales_GN))
    for offset in {0, offset_of(weight, kind)}:
        texts = assembly(weight, kind, offset)
        assert texts is not None
        planes = [halves(Registers([words_of(weight)]).run(text), kind).flatten(2) for text in texts]
        assert all(plane.shape[2] == WORDS for plane in planes)
        assert torch.equal(torch.stack(planes, dim=2).flatten(1), ones.unpack().double() + offset)


def test_words_of_a_cache() -> None:
    """Both bytes of two words, of which the first has one number and then the other for all numbers."""
    codes = torch.arange(256)
    bytes_ = torch.stack((codes, codes.flip(0), codes.roll(7), codes.roll(50)), dim=-1).to(torch.uint8)
    words = (bytes_.long() << torch.tensor([0, 8, 16, 24])).sum(-1)
    floats, integers = (bytes_.view(kind).double() for kind in (torch.float8_e4m3fn, torch.int8))
    run = Registers([words, words])
    for found, plane in ((run.run(pairs_of_e4m3()), 0), (run.values["$1"], 1)):
        torch.testing.assert_close(halves(found, torch.float16), floats[:, plane::2], rtol=0, atol=0, equal_nan=True)
    for plane in range(2):
        found = halves(Registers([words]).run(int8_of_two(plane)), torch.bfloat16)
        assert torch.equal(found, integers[:, plane::2])
