"""Accounting for a step's time: gaps, overlaps and classes, from hand-made traces whose answers are known."""

from __future__ import annotations

from typing import Any

import pytest

from octavo_bench.device.timeline import OP, STEP, DeviceSpan, account, kernel_class, spans_of, summarise


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args}


def step(number: int, ts: float, dur: float) -> dict[str, Any]:
    return event("user_annotation", f"{STEP}{number}", ts, dur)


def test_gaps_inside_a_step_and_between_steps() -> None:
    spans = [
        DeviceSpan("a", 0, 10, 0),
        DeviceSpan("b", 12, 20, 0),
        DeviceSpan("a", 25, 35, 1),
        DeviceSpan("b", 35, 40, 1),
    ]
    found = account(spans)
    assert (found.total, found.inside, found.between, found.busy) == (40, 2, 5, 33)
    assert found.own == [10, 8, 10, 5]


def test_time_that_two_kernels_share_counts_once() -> None:
    """As with dependent launches: the second kernel is there early, waits for the first, and works after it."""
    spans = [
        DeviceSpan("first", 0, 10, 0),
        DeviceSpan("second", 4, 16, 0),
        DeviceSpan("within", 5, 8, 0),
        DeviceSpan("third", 20, 21, 0),
    ]
    found = account(spans)
    assert found.own == [10, 6, 0, 1]
    assert sum(found.own) == found.busy == 17
    assert found.inside == 4


def test_nothing_ran() -> None:
    assert account([]).total == 0
    assert summarise([], 3)["idle_inside_percent"] == 0


def test_kernels_belong_to_the_step_that_launched_them() -> None:
    """Kernels of a graph share the correlation of its one launch, and may run when the host is a step further."""
    events = [
        step(0, 0, 10),
        step(1, 20, 10),
        event("cuda_runtime", "cudaGraphLaunch", 5, 1, correlation=7),
        event("cuda_driver", "cuLaunchKernelEx", 21, 1, correlation=8),
        event("cuda_runtime", "cudaLaunchKernel", 15, 1, correlation=9),
        event("kernel", "late", 26, 4, correlation=8),
        event("kernel", "graph_a", 22, 2, correlation=7),
        event("gpu_memcpy", "Memcpy DtoH", 24, 1, correlation=7),
        event("kernel", "outside", 16, 4, correlation=9),
        event("kernel", "unknown", 17, 4),
        event("gpu_user_annotation", f"{STEP}0", 22, 3),
        event("cpu_op", "aten::mm", 2, 3),
    ]
    assert spans_of(events) == [
        DeviceSpan("graph_a", 22, 24, 0),
        DeviceSpan("Memcpy DtoH", 24, 25, 0),
        DeviceSpan("late", 26, 30, 1),
    ]


def test_without_a_device_the_outermost_operations_count() -> None:
    events = [
        step(0, 0, 100),
        event("user_annotation", f"{OP}attention", 10, 20),
        event("cpu_op", "aten::mm", 12, 5),
        event("cpu_op", "aten::add", 40, 2),
        event("cpu_op", "aten::mul", 140, 2),
        {**event("cpu_op", "elsewhere", 50, 2), "tid": 2},
        {"ph": "i", "name": "marker", "ts": 1},
    ]
    assert spans_of(events) == [DeviceSpan("attention", 10, 30, 0), DeviceSpan("aten::add", 40, 42, 0)]


def test_summary_is_per_step() -> None:
    spans = [
        DeviceSpan("gate_up_linear", 0, 6, 0),
        DeviceSpan("rms_norm", 8, 10, 0),
        DeviceSpan("gate_up_linear", 10, 20, 1),
    ]
    found = summarise(spans, 2, top=1)
    assert found["busy_us"] == 9
    assert found["us_by_class"] == {"matmul": 8, "norm": 1}
    assert found["idle_inside_percent"] == 10
    assert found["idle_between_percent"] == 0
    assert found["kernels"] == [{"name": "gate_up_linear", "class": "matmul", "per_step": 1, "us_per_step": 8}]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("nvjet_tst_128x64_64x8_4x1_v_bz_TNN", "matmul"),
        ("linear_rows_kernel", "matmul"),
        ("walking_gemv_kernel", "matmul"),
        ("skinny_kernel", "matmul"),
        ("_decode_kernel", "attention"),
        ("gate_kernel", "activation"),
        ("_race_kernel", "sampling"),
        ("_stage_kernel", "copy"),
        ("_paged_attention_split", "attention"),
        ("store_kv_kernel", "attention"),
        ("rms_norm_kernel", "norm"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps>", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", "other"),
    ],
)
def test_classes_of_kernels(name: str, label: str) -> None:
    assert kernel_class(name) == label
