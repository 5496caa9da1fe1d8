"""The few instructions of PTX that unpack numbers, on tensors of registers: two numbers of 16 bits in 32."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

STATEMENT = re.compile(r"([a-z0-9.]+)\s+(.*)")
MASK = 0xFFFFFFFF


class Registers:
    """Runs instructions on int64 tensors, each with the bits of a register of 32."""

    def __init__(self, operands: list[Tensor]) -> None:
        """``operands`` are $1, $2 and so on."""
        self.values = {f"${i}": operand for i, operand in enumerate(operands, 1)}

    def run(self, text: str) -> Tensor:
        """What $0 is after the text. A register of 32 may be taken apart into two of 16, named in braces."""
        text = re.sub(r"mov\.b32 \{(\w+), (\w+)\}, (\w+);", r"and.b32 \1, \3, 0xffff; shr.b32 \2, \3, 16;", text)
        for part in re.split(r"[;{}]", text):
            if (part := part.strip()) and not part.startswith(".reg"):
                found = STATEMENT.fullmatch(part)
                assert found is not None, part
                target, *sources = (name.strip() for name in found[2].split(","))
                self.values[target] = self._of(found[1])(*map(self._read, sources)) & MASK
        return self.values["$0"]

    def _read(self, name: str) -> Tensor:
        return self.values[name] if name in self.values else torch.tensor(int(name, 0))

    def _of(self, instruction: str) -> Callable[..., Tensor]:
        kind = torch.bfloat16 if instruction.endswith("bf16x2") else torch.float16
        known: dict[str, Callable[..., Tensor]] = {
            "mov.b32": lambda a: a,
            "shr.b32": lambda a, n: a >> n,
            "shl.b32": lambda a, n: a << n,
            "and.b32": lambda a, b: a & b,
            "lop3.b32": _lop3,
            "fma.rn.bf16x2": lambda a, b, c: packed(halves(a, kind) * halves(b, kind) + halves(c, kind), kind),
            "fma.rn.f16x2": lambda a, b, c: packed(halves(a, kind) * halves(b, kind) + halves(c, kind), kind),
            "prmt.b32": _prmt,
            "cvt.rn.f16x2.e4m3x2": lambda a: packed(_bytes(a)[..., :2].view(torch.float8_e4m3fn).double(), kind),
            "sub.f16x2": lambda a, b: packed(halves(a, kind) - halves(b, kind), kind),
        }
        return known[instruction]


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    assert table == 0xEA, "a & b | c"
    return a & b | c


def _prmt(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    assert b == 0
    chosen = [_bytes(a)[..., (int(selector) >> 4 * i) & 3].long() << 8 * i for i in range(4)]
    return chosen[0] | chosen[1] | chosen[2] | chosen[3]


def _bytes(registers: Tensor) -> Tensor:
    return torch.stack([registers >> 8 * i & 0xFF for i in range(4)], dim=-1).to(torch.uint8)


def halves(registers: Tensor, kind: torch.dtype) -> Tensor:
    """The two numbers of each register, float64 [..., 2], the low half first."""
    low, high = registers & 0xFFFF, registers >> 16
    return torch.stack((low, high), dim=-1).to(torch.int16).view(kind).double()


def packed(numbers: Tensor, kind: torch.dtype) -> Tensor:
    """Registers of two numbers each, [..., 2], rounded to this type."""
    bits = numbers.to(kind).view(torch.int16).long() & 0xFFFF
    return bits[..., 0] | bits[..., 1] << 16
