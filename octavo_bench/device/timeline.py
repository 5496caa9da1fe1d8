"""From a profiler's trace to where the time of a step goes. No torch here: the events are those of a Chrome trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

STEP = "octavo step "
"""Annotations of this name and a number mark the steps on the host's timeline."""
OP = "octavo op "
"""Annotations of an operation whose work no profiler sees, such as one in numba."""

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}

CLASSES = (
    ("attention", r"attention|attn|flash|fmha|store_kv|rope|^_decode_kernel|^_prefill_kernel|^_hopper_kernel"),
    ("matmul", r"linear|gemm|gemv|skinny|matmul|nvjet|cutlass|cublas|splitk|split_k|::mm|::addmm|::bmm"),
    ("activation", r"silu|gelu|gate_kernel"),
    ("sampling", r"sampl|argmax|topk|top_k|sort|softmax|exponential|noise|multinomial|penalt|race|settle"),
    ("norm", r"norm"),
    ("copy", r"memcpy|memset|copy|::to\b|index|gather|scatter|embedding|cat|stage_"),
)
"""Class to a pattern of kernel names; the first that is found counts, and what matches none is "other"."""


class DeviceSpan(NamedTuple):
    """One piece of device work, in microseconds, and the step that launched it."""

    name: str
    start: float
    end: float
    step: int


def kernel_class(name: str) -> str:
    """The class of ``CLASSES`` that a kernel's name belongs to."""
    return next((label for label, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def spans_of(events: Sequence[dict[str, Any]]) -> list[DeviceSpan]:
    """The device work in a trace; where there is none, the host's outermost operations, as on a CPU.

    A kernel belongs to the step during which it was launched, also when it ran later. Work launched outside of every
    step is left out.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    steps = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(STEP)), event["tid"])
        for event in complete
        if event.get("cat") == "user_annotation" and event["name"].startswith(STEP)
    )
    kernels = [event for event in complete if event.get("cat") in DEVICE_WORK]
    if not kernels:
        return _host_spans(complete, steps)
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in complete
        if event.get("cat") in LAUNCHES and "correlation" in event.get("args", {})
    }
    spans = []
    for event in kernels:
        launched = launches.get(event["args"].get("correlation"))
        step = None if launched is None else _step_at(steps, launched)
        if step is not None:
            spans.append(DeviceSpan(event["name"], event["ts"], event["ts"] + event["dur"], step))
    return sorted(spans, key=lambda span: (span.start, span.end))


def _step_at(steps: Iterable[tuple[float, float, int, Any]], moment: float) -> int | None:
    return next((number for start, end, number, _ in steps if start <= moment <= end), None)


def _host_spans(complete: Iterable[dict[str, Any]], steps: Sequence[tuple[float, float, int, Any]]) -> list[DeviceSpan]:
    threads = {thread for _, _, _, thread in steps}
    ops = [
        event
        for event in complete
        if event["tid"] in threads
        and (event.get("cat") == "cpu_op" or (event.get("cat") == "user_annotation" and event["name"].startswith(OP)))
    ]
    spans: list[DeviceSpan] = []
    for event in sorted(ops, key=lambda event: (event["ts"], -event["dur"])):
        step = _step_at(steps, event["ts"])
        if step is not None and (not spans or event["ts"] >= spans[-1].end):
            spans.append(DeviceSpan(event["name"].removeprefix(OP), event["ts"], event["ts"] + event["dur"], step))
    return spans


class TimeAccount(NamedTuple):
    """Where the time from the first kernel's start to the last one's end went, in microseconds."""

    total: float
    inside: float
    """Nothing ran, between two kernels of one step."""
    between: float
    """Nothing ran, between kernels of two steps."""
    own: list[float]
    """For each span the time that it alone added: kernels that overlap, as with dependent launches, count once."""

    @property
    def busy(self) -> float:
        return self.total - self.inside - self.between


def account(spans: Sequence[DeviceSpan]) -> TimeAccount:
    """Busy and idle time of spans in the order of their starts."""
    inside = between = 0.0
    own: list[float] = []
    until, step = (spans[0].start, spans[0].step) if spans else (0.0, 0)
    for span in spans:
        if span.start > until:
            if span.step == step:
                inside += span.start - until
            else:
                between += span.start - until
        own.append(max(0.0, span.end - max(span.start, until)))
        if span.end > until:
            until, step = span.end, span.step
    return TimeAccount(until - spans[0].start if spans else 0.0, inside, between, own)


def summarise(spans: Sequence[DeviceSpan], num_steps: int, top: int = 25) -> dict[str, Any]:
    """Per step: busy time, time by class, idle shares in per cent, and the ``top`` kernels. Times in microseconds."""
    found = account(spans)
    by_class: dict[str, float] = defaultdict(float)
    by_name: dict[str, list[float]] = defaultdict(list)
    for span, own in zip(spans, found.own, strict=True):
        by_class[kernel_class(span.name)] += own
        by_name[span.name].append(own)
    ranked = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "kernels_per_step": round(len(spans) / num_steps, 1),
        "busy_us": round(found.busy / num_steps, 2),
        "idle_inside_percent": round(100 * found.inside / found.total, 2) if found.total else 0.0,
        "idle_between_percent": round(100 * found.between / found.total, 2) if found.total else 0.0,
        "us_by_class": {label: round(us / num_steps, 2) for label, us in sorted(by_class.items())},
        "kernels": [
            {
                "name": name[:160],
                "class": kernel_class(name),
                "per_step": round(len(own) / num_steps, 2),
                "us_per_step": round(sum(own) / num_steps, 2),
            }
            for name, own in ranked[:top]
        ],
    }
