"""Stateless random numbers: each is a hash of (seed, position, token id), the same on every device.

The random numbers of a request therefore do not depend on other requests, the order of a batch, preemption or a
replay. Integers are held in int64 and truncated to 32 bits after every product; no product overflows int64, so every
device computes the same bits.

Shapes: V vocabulary, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

_32_BITS = 2**32 - 1
_64_BITS = 2**64 - 1
LARGEST_BELOW_ONE = 1 - 2**-24


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """``hashes_of`` all tokens of a vocabulary. Computed once."""
    return hashes_of(torch.arange(vocab_size, dtype=torch.int64, device=device))


def hashes_of(token_ids_C: Tensor) -> Tensor:
    """A well-mixed 32-bit hash of each token id; int64 [C]."""
    return _mix(token_ids_C)


def exponentials(hashes_C: Tensor, seed: int, position: int) -> Tensor:
    """Standard exponential variates of these tokens at this position; float32 [C], all above 0.

    ``hashes_C`` are entries of ``token_hashes``. Small values, which decide an exponential race, have the finest
    resolution.
    """
    factor, offset = key_of(seed, position)
    bits_C = _mix((hashes_C * _signed(factor) + offset) & _32_BITS)
    uniform_C = ((bits_C.to(torch.float64) + 0.5) * 2.0**-32).float().clamp_(max=LARGEST_BELOW_ONE)
    return torch.log1p(-uniform_C).neg_()


def key_of(seed: int, position: int) -> tuple[int, int]:
    """The factor and the offset, unsigned 32-bit numbers, that make a token's hash the bits of its variate."""
    key = _split_mix(_split_mix(seed & _64_BITS) ^ position)
    return key >> 32 | 1, key & _32_BITS


def row_exponentials(vocab_size: int, seeds_R: Tensor, positions_R: Tensor) -> Tensor:
    """The variates of ``exponentials`` for every token of each row, float32 [R, V], without a look at the host."""
    keys_R = _split_mix_rows(_split_mix_rows(seeds_R) ^ positions_R.long())
    factors_R, offsets_R = (keys_R >> 32) & _32_BITS | 1, keys_R & _32_BITS
    factors_R = torch.where(factors_R >= 2**31, factors_R - 2**32, factors_R)
    hashes_V = token_hashes(vocab_size, seeds_R.device)
    bits_RV = _mix((hashes_V * factors_R.unsqueeze(1) + offsets_R.unsqueeze(1)) & _32_BITS)
    uniform_RV = ((bits_RV.to(torch.float64) + 0.5) * 2.0**-32).float().clamp_(max=LARGEST_BELOW_ONE)
    return torch.log1p(-uniform_RV).neg_()


def _split_mix_rows(x: Tensor) -> Tensor:
    """``_split_mix`` of int64, whose products and sums wrap around."""
    x = x + _as_int64(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """``x`` as an unsigned number, shifted right."""
    return (x >> count) & (_64_BITS >> count)


def _as_int64(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _split_mix(x: int) -> int:
    """One output of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _64_BITS
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _64_BITS
    return x ^ x >> 31


def _signed(x: int) -> int:
    """The signed 32-bit number with the same bits, so that its product with a 32-bit number fits int64."""
    return x - 2**32 if x >= 2**31 else x


def _mix(x: Tensor) -> Tensor:
    """Mix 32-bit numbers (``lowbias32`` of Wellons' hash prospector: a bijection with little bias)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _32_BITS
    x = x ^ (x >> 15)
    x = (x * _signed(0x846CA68B)) & _32_BITS
    return x ^ (x >> 16)
