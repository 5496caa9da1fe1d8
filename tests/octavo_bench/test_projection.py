"""The projection of a step over several GPUs, from steps whose kernels follow a line."""

from __future__ import annotations

import pytest

from octavo_bench.projection import MeasuredStep, project, ring_microseconds

START, PER_BYTE = 2.0, 1e-6


def step(matmul_bytes: float, attention_bytes: float, layers: int) -> MeasuredStep:
    """A step in which each kernel takes START and PER_BYTE for each byte."""
    matmuls = 4 * layers + 1
    us = {
        "matmul": matmuls * START + PER_BYTE * matmul_bytes,
        "attention": layers * START + PER_BYTE * attention_bytes,
        "norm": 30.0,
    }
    return MeasuredStep(sum(us.values()), us, matmuls, layers, matmul_bytes, attention_bytes)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_reads_its_part(ranks: int) -> None:
    measured, other = step(16e9, 4e9, 36), step(2e9, 1e9, 16)
    parts = project(measured, [other], hidden=4096, batch=8, ranks=ranks, exchange_us=5.0, link=4e11)
    pushed_us = (ranks - 1) * 8 * 4096 * 2 / 4e11 * 1e6
    assert parts["matmul"] == pytest.approx(145 * START + PER_BYTE * 16e9 / ranks, abs=0.1)
    assert parts["attention"] == pytest.approx(36 * START + PER_BYTE * 4e9 / ranks, abs=0.1)
    assert parts["shared"] == 30.0
    assert parts["exchange"] == pytest.approx(74 * (5.0 + pushed_us) if ranks > 1 else 0.0, abs=0.1)
    if ranks == 1:
        assert parts["step"] == pytest.approx(measured.step_us, abs=0.1)


def test_messages_take_a_measurable_time() -> None:
    assert 0 < ring_microseconds(rounds=20) < 1e6
