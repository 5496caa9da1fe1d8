"""Which CUDA graph a step runs through, and when graphs are captured; decided here, so that every executor of a model
captures and replays the same graphs in the same order.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from octavo.engine.runner.kernel_tuning import NO_TUNING, TuningPlan, tune_kernels
from octavo.engine.runner.step_runner import StepRunner
from octavo.steps.graph_shapes import (
    GraphLimits,
    PlanSizes,
    StepKind,
    StepShape,
    early_shapes,
    first_extra_shapes,
    first_shapes,
    graph_shapes,
    longest_shapes,
    next_shapes,
    padded_shape,
)
from octavo.steps.messages import Compile, Reply
from octavo.system.background_threads import stop_if_ending

logger = logging.getLogger(__name__)

PREPARING = "prepare"
"""Name of the thread that compiles kernels and captures graphs after startup."""
BACKGROUND_COMPILE_THREADS = 2
"""Few: half of compiling is Python, so each of these threads competes for the GIL with the thread that runs steps."""
MOST_OF_STEPS = 0.1
"""A capture that a step waits for takes at most this part of the time since the last one, or since the start; one on an
idle device, into which a step may come, of the time since the last step."""
IDLE_SECONDS = 0.05
"""The device counts as idle this long after the last step, at least."""
NEARLY = 1.25
"""A graph with at most so many times the rows is good enough while there is traffic: a capture delays a step."""
FEW_ROWS = 16
"""Steps of 2 to so many rows take the same time: that of reading the weights, by the same kernels."""
LONG_CONTEXT_LOST = 0.25
"""The least part of a step's time that counts as lost if few programs share a long context, or if the positions of a
short one are chosen. Rows do not tell that."""
UNWANTED_DRAFTS = 0.5
"""The least part of a step's time that counts as lost if its graph makes drafts and the step needs none. Rows do not
tell that: a drafter runs once for each draft, which takes about a sixth of a short step with a head of one layer, and
more with a draft model. Rather too much: a graph that is captured too early costs once, too late it costs every step.
"""
HANDOVER_SECONDS = 0.001
"""Pause between two captures on an idle device, in which a waiting step can take the lock."""


class GraphDispatcher:
    """The padded shapes of steps, and the shapes that have a graph or may have one captured."""

    def __init__(self, limits: GraphLimits, uses_graphs: bool = True) -> None:
        """Without ``uses_graphs``, steps are padded and run eagerly."""
        self._limits = limits
        self._uses_graphs = uses_graphs
        self._captured: set[StepShape] = set()
        self._lost: set[StepShape] = set()
        """Of the captured shapes, those whose graphs the executor lost: it captures each when it is used next."""
        self._compiled: list[StepShape] = []
        self._wanted: dict[StepShape, None] = {}
        """Shapes of steps that were padded to others, oldest first: their graphs are the first when it is idle."""
        self._nearest: dict[StepShape, StepShape | None] = {}
        """The smallest captured shape that holds another one, as long as nothing more is captured."""
        self._losses: dict[StepShape, float] = {}
        """By shape that may be captured: seconds that steps lost by being padded to a larger one that is captured."""
        self._losing: tuple[StepShape, float, float] | None = None
        """If the last step was padded so: the shape to capture, the part of its time that is lost, when it was sent."""
        self._capture_seconds = 0.0
        """What a capture takes, the mean of the first graphs'."""
        self._seconds: dict[StepShape, float] = {}
        """What steps through the first graphs take, by which the loss by padding is told."""
        self._parts_lost: dict[tuple[StepShape, StepShape], float] = {}
        """Cache of ``_part_lost``, as a step that is padded asks for it."""
        self._has_all_kernels = False
        """Whether compiling in the background has ended, so that any shape may be captured."""
        self._last_capture = float("-inf")
        """When a step captured a graph last, or the first ones were captured."""
        self._has_extra_kernels = threading.Event()
        """Steps with extras wait for this event, for a second or two after startup."""
        self._has_extra_kernels.set()

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._captured

    def choose(self, sizes: PlanSizes, kind: StepKind) -> tuple[StepShape, bool]:
        """The padded shape of the next step, and whether it runs through a graph; see ``ChooseShape``."""
        if kind.has_extras:
            self._has_extra_kernels.wait()
        longest = min(sizes.longest_context, self._limits.longest_context)
        shape, has_graph = padded_shape(*sizes[:3], self._limits.max_num_seqs, kind, sizes.num_drafts, longest)
        shape = shape._replace(most_context=sizes.most_context)
        if not (sizes.is_plain and has_graph and self._uses_graphs):
            self._note_loss()
            return shape, False
        fitting, has_graph = self.fit(shape)
        self._lost.discard(fitting)
        return fitting, has_graph

    def fit(self, shape: StepShape) -> tuple[StepShape, bool]:
        """The shape to pad a step to, and whether it runs through a graph: its own shape, or a larger one that is
        captured, or compiled and so quick to capture. Without any, it runs eagerly where no capture may delay it.

        A capture delays a step by the time of many. So a step that a captured graph holds is padded to it, until such
        steps have lost as much time by padding as a capture takes, and the last one is long enough ago. Then the graph
        that they lack is captured: their own, or before all kernels are compiled, the smallest that is. So captures
        take no more time than padding has cost before, as far as rows tell, and ``MOST_OF_STEPS`` of all time; and a
        shape of a few steps is never captured.
        """
        self._note_loss()
        if shape in self._captured:
            return shape, True
        nearest = self._nearest  # another thread may put a new one there
        if shape not in nearest:
            self._wanted[shape] = None
            nearest[shape] = _smallest(self._captured, shape)
        known = nearest[shape]
        if known is None:
            return self._fit_without_graph(shape)
        if _is_nearly(known, shape):
            return known, True
        best = shape if self._has_all_kernels else _smallest((known, *self._compiled), shape) or known
        if best not in self._captured:
            if self._losses.get(best, 0.0) >= self._capture_seconds and self._may_delay():
                return self._capture_on_the_way(best)
            part = self._parts_lost.get((known, best))
            if part is None:
                part = self._parts_lost[known, best] = self._part_lost(known, best)
            self._losing = best, part, time.monotonic()
        return known, True

    def _fit_without_graph(self, shape: StepShape) -> tuple[StepShape, bool]:
        """``fit`` of a shape that no captured graph holds. Run eagerly, it is padded as well to what is compiled."""
        known = shape if self._has_all_kernels else _smallest(self._compiled, shape) or shape
        return self._capture_on_the_way(known) if self._may_delay() else (known, False)

    def _may_delay(self) -> bool:
        """Whether a step may wait for a capture now."""
        return self._capture_seconds <= MOST_OF_STEPS * (time.monotonic() - self._last_capture)

    def _capture_on_the_way(self, shape: StepShape) -> tuple[StepShape, bool]:
        """The step that is sent now captures the graph of ``shape``."""
        self._note_captured(shape)
        self._last_capture = time.monotonic()
        return shape, True

    def _note_loss(self) -> None:
        """Add what the last step has lost, if it was padded. It took about as long as it is since it was sent, as the
        next step is sent shortly before it ends; or less, if the device was idle: so this counts as a capture at most.
        """
        if self._losing is not None:
            shape, part, started = self._losing
            seconds = min(time.monotonic() - started, self._capture_seconds)
            self._losses[shape] = self._losses.get(shape, 0.0) + part * seconds
            self._losing = None

    def _part_lost(self, known: StepShape, shape: StepShape) -> float:
        """The part of a step's time that is lost by padding it from ``shape`` to ``known``.

        By the times of measured steps, since one of few rows takes as long as one of more, or where there are none, by
        rows.
        """
        padded_seconds, own_seconds = self._expected_seconds(known), self._expected_seconds(shape)
        if padded_seconds is None or own_seconds is None:
            part = 1 - _size(shape) / _size(known)
        else:
            part = max(0.0, 1 - own_seconds / padded_seconds)
        if known.num_proposed != shape.num_proposed:
            part = max(part, UNWANTED_DRAFTS)
        return part if _is_for_same_contexts(known, shape) else max(part, LONG_CONTEXT_LOST)

    def _expected_seconds(self, shape: StepShape) -> float | None:
        """What a step of this shape takes, between the measured ones of its kind."""
        is_decode = shape.max_query_len == 1
        points = sorted(
            (_size(known), seconds)
            for known, seconds in self._seconds.items()
            if (known.max_query_len == 1) == is_decode and known[3:7] == shape[3:7] and not known.num_drafts
        )
        if shape.num_drafts or not points or _size(shape) > points[-1][0]:
            return None
        sizes, seconds = zip(*points, strict=True)
        return float(np.interp(_size(shape), np.array(sizes), np.array(seconds)))

    def _note_captured(self, shape: StepShape) -> None:
        self._captured.add(shape)
        self._nearest = {}
        self._wanted.pop(shape, None)
        self._losses.pop(shape, None)

    # ---- compiling and capturing, at startup and in the background

    def warm_up(self, runner: StepRunner, tuning: TuningPlan = NO_TUNING, is_full: bool = False) -> None:
        """Compile kernels and capture graphs for a few shapes that fit every step; the others follow in the background,
        or now if it ``is_full``.

        Until then, steps are padded to the shapes that exist. Kernels are chosen first: graphs keep those with which
        they were captured. Those that need no choice are compiled meanwhile.
        """
        first = first_shapes(self._limits)
        if self._uses_graphs:
            first = sorted({*first, *early_shapes(self._limits)}, reverse=True)
        needed = [*longest_shapes(self._limits), *first]
        self._has_extra_kernels.clear()
        compiling = runner.send(Compile(needed, in_background=True))
        tune_kernels(runner.send, tuning)
        started = time.perf_counter()
        compiling.wait()
        runner.send(Compile(needed)).wait()
        compiled = time.perf_counter()
        seconds = self._capture_all(runner, first)
        self._measure(runner, first)
        logger.info("kernels: %.1f s; %d graphs: %.1f s", compiled - started, len(first), seconds)
        if not is_full:
            self._start_thread(_prepare_the_rest, runner)
            return
        for shape in self.compile_the_rest(runner, 0):
            if shape not in self._captured:
                self._capture(runner, shape).wait()
        seconds = time.perf_counter() - compiled
        logger.info("full warm-up: all kernels, and %d graphs: %.1f s", len(self._captured), seconds)

    def _measure(self, runner: StepRunner, shapes: list[StepShape]) -> None:
        """Measure what steps of these shapes take, through their graphs."""
        for shape in shapes:
            started = time.perf_counter()
            runner.capture(shape).wait()  # it is captured, so this is a step of nothing but padding
            self._seconds[shape] = time.perf_counter() - started
        self._parts_lost = {}

    def _start_thread(self, work: Callable[..., None], runner: StepRunner, *args: Any) -> None:
        runner.threads.start(PREPARING, work, self, weakref.ref(runner), *args)

    def capture_again(self, runner: StepRunner) -> None:
        """The executor lost its graphs: capture the first ones now, the others when steps need them or it is idle.

        Steps have the shapes that they had before, and so the same kernels.
        """
        if not self._uses_graphs:
            return
        first = first_shapes(self._limits)
        self._lost = self._captured.difference(first)
        logger.info("graphs, captured again: %.2f s", self._capture_all(runner, first))
        self._start_thread(_capture_the_rest, runner, sorted(self._lost))

    def _capture_all(self, runner: StepRunner, shapes: list[StepShape]) -> float:
        """Capture the graphs of ``shapes``; returns the seconds that it took, and notes what one takes."""
        started = time.perf_counter()
        for reply in [self._capture(runner, shape) for shape in shapes]:
            reply.wait()
        seconds = time.perf_counter() - started
        self._capture_seconds = seconds / len(shapes)
        self._last_capture = time.monotonic()
        return seconds

    def _capture(self, runner: StepRunner, shape: StepShape) -> Reply[Any]:
        self._note_captured(shape)
        return runner.capture(shape)

    def compile_the_rest(self, runner: StepRunner, num_threads: int = BACKGROUND_COMPILE_THREADS) -> list[StepShape]:
        """Compile the kernels of all other shapes, by so many threads; returns the shapes whose graphs to capture."""
        extra, few, shapes = (shapes_of(self._limits) for shapes_of in (first_extra_shapes, next_shapes, graph_shapes))
        started = time.perf_counter()
        try:
            runner.send(Compile(extra, in_background=True)).wait()
            self._compiled += extra
        finally:
            self._has_extra_kernels.set()
        runner.send(Compile(few, num_threads, in_background=True)).wait()
        self._compiled += few
        runner.send(Compile(shapes, num_threads, in_background=True)).wait()
        logger.info("other kernels: %.1f s", time.perf_counter() - started)
        if not self._uses_graphs:
            return []
        self._has_all_kernels = True
        return shapes

    def capture_when_idle(self, runner: StepRunner, shape: StepShape) -> None:
        """Capture the graph of ``shape`` as soon as the device is idle, after those that steps have asked for."""

        def make() -> Any:
            next_shape = next(reversed([*self._wanted]), shape)
            self._note_captured(next_shape)
            self._lost.discard(next_shape)
            return runner.encoder.encode_padding(next_shape)

        while (shape not in self._captured or shape in self._lost) and not runner.threads.is_ending:
            stop_if_ending()
            is_idle = runner.send_when_idle(make, max(IDLE_SECONDS, self._capture_seconds / MOST_OF_STEPS))
            # A thread that waits for the lock gets it only if it is not acquired again at once.
            time.sleep(HANDOVER_SECONDS if is_idle else IDLE_SECONDS)


def _smallest(shapes: Iterable[StepShape], shape: StepShape) -> StepShape | None:
    """The smallest of ``shapes``, to which another thread may add, that a step of ``shape`` can be padded to."""
    return min((known for known in tuple(shapes) if known.holds(shape)), default=None)


def _size(shape: StepShape) -> int:
    """Rows of layers and head."""
    return shape.num_rows + shape.num_samples


def _is_for_same_contexts(known: StepShape, shape: StepShape) -> bool:
    return known.has_long_context == shape.has_long_context and known.most_context == shape.most_context


def _is_nearly(known: StepShape, shape: StepShape) -> bool:
    """Whether ``known``, which holds ``shape``, takes hardly longer: it makes as many drafts, is for contexts as long,
    and has hardly more rows of layers and head, or few for the same number of sequences."""
    size, least = _size(known), _size(shape)
    has_few = 1 < shape.num_rows <= known.num_rows <= FEW_ROWS and known.num_seqs == shape.num_seqs
    is_alike = known.num_proposed == shape.num_proposed and _is_for_same_contexts(known, shape)
    return is_alike and (has_few or size <= NEARLY * least)


def _prepare_the_rest(graphs: GraphDispatcher, weak: weakref.ref[StepRunner]) -> None:
    """Compile in the background, then capture, until all is done or the runner has been garbage-collected."""
    runner = weak()
    shapes: Iterable[StepShape] = [] if runner is None else graphs.compile_the_rest(runner)
    del runner
    _capture_the_rest(graphs, weak, shapes)


def _capture_the_rest(graphs: GraphDispatcher, weak: weakref.ref[StepRunner], shapes: Iterable[StepShape]) -> None:
    """Capture the graphs of these shapes while the device is idle, until the runner has been garbage-collected."""
    started = time.perf_counter()
    for shape in shapes:
        if (runner := weak()) is None:
            return
        graphs.capture_when_idle(runner, shape)
        del runner
    logger.info("other graphs, between steps: %.1f s", time.perf_counter() - started)
