"""The references against straightforward float64 computations, over random shapes."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops import dispatch
from octavo.ops.linear.linear import Activation, Fused
from tests.tiers import one_in

ATTENTION = importlib.import_module("octavo.ops.attention.attention")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def references() -> object:
    with dispatch.only("reference"):
        torch.manual_seed(0)
        yield


def assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 576)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    wide = x.double()
    expected = wide / torch.sqrt((wide**2).sum(-1, keepdim=True) / shape[1] + 1e-5) * weight.double()
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    assert_close(found, expected)


def test_rms_norm_of_large_half_precision_values_does_not_overflow() -> None:
    x = torch.full((1, 8), 1000.0, dtype=torch.float16)
    assert ops.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", [2, 4])
def test_apply_rope_turns_pairs_as_complex_numbers(pairs: int, dtype: torch.dtype) -> None:
    q, k = torch.randn(5, 3, 8).to(dtype), torch.randn(5, 1, 8).to(dtype)
    angles = torch.rand(5, pairs, dtype=torch.float64) * 6
    cos, sin = angles.cos(), angles.sin()
    if dtype != torch.float64:
        cos, sin = cos.float(), sin.float()
    for found, x in zip(ops.apply_rope(q, k, cos, sin), (q, k), strict=True):
        wide = x.double()
        turned = torch.complex(wide[..., :pairs], wide[..., pairs : 2 * pairs]) * torch.polar(
            torch.ones_like(angles), angles
        ).unsqueeze(1)
        assert found.dtype == dtype
        assert_close(found, torch.cat((turned.real, turned.imag, wide[..., 2 * pairs :]), dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(4, 10).to(dtype) * 3
    gate, up = x.double()[:, :5], x.double()[:, 5:]
    assert_close(ops.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(with_bias: bool) -> None:
    x, weight = torch.randn(4, 10), torch.randn(3, 10)
    bias = torch.randn(3) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert_close(ops.linear(x, weight, Fused(bias)), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_linear_with_all_that_stands_around_it(activation: Activation) -> None:
    x, weight, bias, norm, residual = (torch.randn(s) for s in ((4, 10), (6, 10), (6,), (10,), (4, 3)))
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
    gate, up = (normed @ weight.double().T + bias.double()).chunk(2, dim=-1)
    if activation == "silu":
        acted = gate * gate.sigmoid()
    elif activation == "gelu":
        acted = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    else:
        acted = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    expected = acted * up + residual.double()
    assert_close(ops.linear(x, weight, Fused(bias, norm, 1e-5, residual.clone(), activation)), expected)


def test_store_kv_writes_its_slots_and_no_other() -> None:
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    caches = torch.full((2, 5, 2, 8, 4), math.nan, dtype=torch.bfloat16).unbind()
    slots = [39, 0, 17]
    ops.store_kv(k, v, *caches, torch.tensor(slots))
    for cache, rows in zip(caches, (k, v), strict=True):
        for slot, row in zip(slots, rows, strict=True):
            assert torch.equal(cache[slot // 8, :, slot % 8], row.bfloat16())
        assert cache.isnan().sum() == cache.numel() - rows.numel()


def attend_plainly(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """One sequence, one row, one head at a time; keys and values are [C, K, H]."""
    num_rows, num_heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.float64)
    group = num_heads // keys.shape[1]
    for i in range(num_rows):
        end = len(keys) - num_rows + i + 1
        for n in range(num_heads):
            start = max(0, end - window) if window else 0
            scores = keys[start:end, n // group] @ q[i, n].double() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if slopes is not None:
                scores = scores - slopes[n].double() * (end - 1 - torch.arange(start, end))
            extra = 0 if sinks is None else sinks[n].double().exp()
            weights = scores.exp() / (scores.exp().sum() + extra)
            out[i, n] = weights @ values[start:end, n // group]
    return out


@one_in(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(5, 5), (1, 9), (3, 20), (1, 1), (1, 30), (16, 16)],
        [(1, 4), (1, 17), (1, 8)],
    ],
)
@pytest.mark.parametrize("max_scratch", [1, ATTENTION.MAX_SCRATCH])
@pytest.mark.parametrize(("window", "softcap", "has_sinks"), [(0, 0.0, False), (6, 0.0, False), (3, 0.7, True)])
def test_paged_attention(
    window: int,
    softcap: float,
    has_sinks: bool,
    lengths: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    max_scratch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ragged rows over shuffled blocks; whatever no row sees holds NaN."""
    monkeypatch.setattr(ATTENTION, "MAX_SCRATCH", max_scratch)
    block_size, head_dim, num_blocks = 4, 8, 40
    caches = torch.full((2, num_blocks, num_kv_heads, block_size, head_dim), math.nan, dtype=dtype).unbind()
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    tables = torch.zeros(len(lengths), 10, dtype=torch.int32)
    q = torch.randn(sum(rows for rows, _ in lengths), num_heads, head_dim).to(dtype)
    sinks = torch.randn(num_heads) if has_sinks else None
    slopes = torch.rand(num_heads) if has_sinks else None
    expected, first = [], 0
    for s, (num_rows, seq_len) in enumerate(lengths):
        keys, values = torch.randn(2, seq_len, num_kv_heads, head_dim).to(dtype)
        tables[s, : -(-seq_len // block_size)] = torch.tensor([free.pop() for _ in range(-(-seq_len // block_size))])
        slots = torch.tensor([int(tables[s, p // block_size]) * block_size + p % block_size for p in range(seq_len)])
        ops.store_kv(keys, values, *caches, slots)
        rows = q[first : first + num_rows]
        expected.append(attend_plainly(rows, keys.double(), values.double(), 0.3, window, softcap, sinks, slopes))
        for position in range(seq_len - num_rows - window + 1 if window else 0):
            for cache in caches:
                cache[tables[s, position // block_size], :, position % block_size] = math.nan
        first += num_rows
    cu_seqlens_q = torch.tensor([0, *(rows for rows, _ in lengths)]).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32)
    found = ops.paged_attention(q, *caches, tables, cu_seqlens_q, seq_lens, 0.3, window, softcap, sinks, None, slopes)
    assert found.dtype == dtype
    assert_close(found, torch.cat(expected))


def test_paged_attention_of_a_long_prompt_stays_small() -> None:
    """The last rows of 32k positions: scores of all rows at once would take 2 GiB for each head."""
    import resource

    block_size, num_blocks, num_rows = 64, 512, 512
    caches = torch.randn(2, num_blocks, 1, block_size, 8).unbind()
    q = torch.randn(num_rows, 8, 8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = ops.paged_attention(
        q,
        *caches,
        torch.arange(num_blocks, dtype=torch.int32).unsqueeze(0),
        torch.tensor([0, num_rows], dtype=torch.int32),
        torch.tensor([num_blocks * block_size], dtype=torch.int32),
        1.0,
    )
    assert out.isfinite().all()
    # It takes 190 MiB, and scores of all heads at once 512; other threads of this process may take some, too.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024


def test_layer_norm_and_gelu_are_what_they_say() -> None:
    x = torch.randn(5, 24, dtype=torch.float64) * 3 + 1
    weight, bias = torch.randn(24, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    exact = x * (1 + torch.erf(x / 2**0.5)) / 2
    tanh = x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        found = ops.layer_norm(x.to(dtype), weight.to(dtype), bias.to(dtype), 1e-5)
        torch.testing.assert_close(found, normed.to(dtype), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ops.gelu(x.to(dtype), False), exact.to(dtype), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(ops.gelu(x.to(dtype), True), tanh.to(dtype), rtol=tolerance, atol=tolerance)
