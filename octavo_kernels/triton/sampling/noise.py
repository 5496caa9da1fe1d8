"""The variates of ``ops.noise`` in kernels: the same hash to the bit, the same logarithms to some units of 1e-7."""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LARGEST_BELOW_ONE = tl.constexpr(1 - 2**-24)


@triton.jit
def row_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The two 32-bit numbers that a row's seed (int64) and position (int32) make of each token's hash; uint32."""
    key = _split_mix(_split_mix(seed.to(tl.uint64, bitcast=True)) ^ position.to(tl.uint64))
    return (key >> 32).to(tl.uint32) | 1, key.to(tl.uint32)


@triton.jit
def minus_log_exponentials(ids: tl.tensor, factor: tl.tensor, offset: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    """``-log(exponential variate)`` of these tokens in the row of this key: what a race adds to their logits."""
    bits = _mix(_mix(ids.to(tl.uint32)) * factor + offset)
    # Two exact halves, so that their sum rounds once, as the reference does from float64.
    uniform = (bits >> 16).to(tl.float32) * 2.0**-16 + ((bits & 0xFFFF).to(tl.float32) + 0.5) * 2.0**-32
    uniform = tl.minimum(uniform, LARGEST_BELOW_ONE)
    # -log(1 - u): near 0 the subtraction would lose u, so there a polynomial, fitted at Chebyshev's points to 4e-8.
    series = 0.14381852 + uniform * 0.33995219
    series = 0.33285477 + uniform * (0.25782051 + uniform * series)
    series = uniform * (1.0 + uniform * (0.50001056 + uniform * series))
    variate = tl.where(uniform < 0.25, series, _log_2(1.0 - uniform, IS_CUDA) * -LN_2)
    return _log_2(variate, IS_CUDA) * -LN_2


@triton.jit
def _split_mix(x: tl.tensor) -> tl.tensor:
    """One output of SplitMix64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Mix 32-bit numbers: ``lowbias32``."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _log_2(x: tl.tensor, IS_CUDA: tl.constexpr) -> tl.tensor:
    """The base-2 logarithm of normal numbers within 2^-22 (PTX manual, ``lg2.approx``), in one instruction, not 30."""
    if IS_CUDA:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return tl.log2(x)
