"""Device time of calls as they run in a decode step: captured in a CUDA graph, one after the other."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence

import torch

from octavo.ops.device_captures import captured
from octavo_kernels.triton.launch import pdl

Call = Callable[[], object]
RUNS = 7


def microseconds(calls: Sequence[Call], with_pdl: bool, runs: int = RUNS) -> float:
    """Median time of one of the calls, which take turns so that no cache holds what the next one reads.

    Each is run once before, so that it is compiled; the time is that of the whole graph over their number.
    """
    with pdl() if with_pdl else contextlib.nullcontext():
        graph = capture(calls)
    return median_milliseconds(graph.replay, runs) * 1e3 / len(calls)


def capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The calls in one graph, each run once before on a stream of its own."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        with captured(graph):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def median_milliseconds(work: Callable[[], object], runs: int = 20) -> float:
    """Median device time of ``work``, after three runs that warm up."""
    for _ in range(3):
        work()
    marks = [(_event(), _event()) for _ in range(runs)]
    for before, after in marks:
        before.record()
        work()
        after.record()
    marks[-1][1].synchronize()
    return statistics.median(float(before.elapsed_time(after)) for before, after in marks)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
