"""``sum_over_experts``: one call, in which a driver makes the calls of the chosen experts.

Which experts are chosen, and for how many rows, is known only while a step runs. So the calls of every expert are
planned once, for ROWS rows in buffers that do not exist: a *plan*, which all steps share. The driver lends the memory,
copies an expert's records, writes the number of rows and the buffers' addresses into them, and makes the calls. Where
many experts have about as many rows, as in a decode step, each is computed by one thread: threads then need not wait
for each other after each product.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.dispatch import is_wrapped
from octavo.ops.moe import RESULT_ROWS, SeparateExperts, sum_over_experts
from octavo_kernels.cpu.calls import Arena, Arguments, call, planning
from octavo_kernels.cpu.compiled import driver, inlined, task
from octavo_kernels.cpu.memory import call_driver, fields, keep, read, view, whole_lines
from octavo_kernels.cpu.rows.columns import declines
from octavo_kernels.cpu.tensors import address
from octavo_kernels.cpu.threads import run, width

ROWS = 256
"""Most rows of an expert that are computed at once."""
NUMBERS_A_PIECE = 8192
LINE = 64

EXPERT = fields("first end found")
"""An expert's calls, and where in the lent memory its result is; its input is at the beginning."""
CALL = fields("driver first size rows first_move end_move")
"""A call's words; which of these is the number of rows; and those that are addresses within the lent memory."""
ITEM = fields("expert first count")
"""Some rows of an expert, as places in ``order``."""
ARGUMENTS = fields(
    "x ids shares residual out T D S X experts calls num_calls words num_words moves num_moves memory most_words "
    "gather keep compute add order where results items num_items room item failed"
)
"""The last eight are set by the driver: the places [T S] in the order of their experts, and where each is among them,
or -1; results [T S, D] in that order; the items; and where it computes one after the other, the lent memory, and which
is at hand; whether a call has failed."""


@inlined
def _gather(a: Any, item: Any, begin: int, end: int, room: int) -> None:
    """Copy rows of an item to the expert's input."""
    order = view(a.order, a.T * a.S, np.int64)
    for r in range(begin, end):
        x = a.x + 4 * a.D * (order[item.first + r] // a.S)
        view(room + 4 * a.D * r, a.D, np.float32)[:] = view(x, a.D, np.float32)


@inlined
def _keep(a: Any, item: Any, begin: int, end: int, room: int) -> None:
    """Copy rows of the expert's result to where they are added up."""
    found = room + view(a.experts, a.X, EXPERT)[item.expert].found
    for r in range(begin, end):
        out = a.results + 4 * a.D * (item.first + r)
        view(out, a.D, np.float32)[:] = view(found + 4 * a.D * r, a.D, np.float32)


@inlined
def _make_calls(pool: int, a: Any, item: Any, room: int, record: Any) -> None:
    """Make the planned calls of an item's expert; ``record`` has room for the arguments of one."""
    words, moves = view(a.words, a.num_words, np.int64), view(a.moves, a.num_moves, np.int64)
    expert, calls = view(a.experts, a.X, EXPERT)[item.expert], view(a.calls, a.num_calls, CALL)
    for c in range(expert.first, expert.end):
        planned = calls[c]
        for i in range(planned.size):
            record[i] = words[planned.first + i]
        for i in range(planned.first_move, planned.end_move):
            record[moves[i]] += room
        record[planned.rows] = item.count
        if call_driver(planned.driver, pool, record.ctypes.data) != 0:
            a.failed = 1


@task
def _gather_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows of the item at hand."""
    a = read(arguments, ARGUMENTS)
    _gather(a, view(a.items, a.num_items, ITEM)[a.item], begin, end, a.room)


@task
def _keep_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows of the item at hand."""
    a = read(arguments, ARGUMENTS)
    _keep(a, view(a.items, a.num_items, ITEM)[a.item], begin, end, a.room)


@task
def _compute_task(arguments: int, begin: int, end: int) -> None:
    """Task over items, each of which one thread computes."""
    a = read(arguments, ARGUMENTS)
    memory, record = whole_lines(1, a.memory // 4), np.empty(a.most_words, np.int64)
    items, room = view(a.items, a.num_items, ITEM), memory.ctypes.data
    for i in range(begin, end):
        _gather(a, items[i], 0, items[i].count, room)
        _make_calls(0, a, items[i], room, record)
        _keep(a, items[i], 0, items[i].count, room)
    keep((memory, record))


@task
def _add_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows: the sum of the results in the order of their experts, and the residual."""
    a = read(arguments, ARGUMENTS)
    order, where = view(a.order, a.T * a.S, np.int64), view(a.where, a.T * a.S, np.int64)
    shares, places, total = view(a.shares, a.T * a.S, np.float32), np.empty(a.S, np.int64), np.empty(a.D, np.float32)
    for t in range(begin, end):
        for s in range(a.S):
            k = s
            while k > 0 and places[k - 1] > where[t * a.S + s]:
                places[k] = places[k - 1]
                k -= 1
            places[k] = where[t * a.S + s]
        total[:] = np.float32(0)
        for s in range(a.S):
            if places[s] >= 0:
                share, row = shares[order[places[s]]], view(a.results + 4 * a.D * places[s], a.D, np.float32)
                for i in range(a.D):
                    total[i] += row[i] * share
        out = view(a.out + 4 * a.D * t, a.D, np.float32)
        if a.residual:
            residual = view(a.residual + 4 * a.D * t, a.D, np.float32)
            for i in range(a.D):
                out[i] = residual[i] + total[i]
        else:
            out[:] = total


@inlined
def _sort(a: Any, starts: Any, order: Any, where: Any) -> Any:
    """Sort places by expert: those of expert i are ``order[starts[i + 1] : starts[i + 2]]``, ascending. Returns how
    many ids are neither an expert's nor -1."""
    ids, wrong = view(a.ids, len(order), np.int64), 0
    for p in range(len(order)):
        where[p] = -1
        if 0 <= ids[p] < a.X:
            starts[ids[p] + 1] += 1
        elif ids[p] != -1:
            wrong += 1
    for i in range(a.X):
        starts[i + 1] += starts[i]
    starts[a.X + 1] = starts[a.X]
    for p in range(len(order) - 1, -1, -1):
        if 0 <= ids[p] < a.X:
            starts[ids[p] + 1] -= 1
            where[p] = starts[ids[p] + 1]
            order[where[p]] = p
    return wrong


@inlined
def _divide(a: Any, starts: Any, items: Any, threads: int) -> Any:
    """Divide the experts' rows into items; whether threads that take an item each are done at about the same time."""
    total = most = 0
    for i in range(a.X):
        for first in range(starts[i + 1], starts[i + 2], ROWS):
            item, count = items[a.num_items], min(ROWS, starts[i + 2] - first)
            item.expert, item.first, item.count = i, first, count
            total, most, a.num_items = total + count + 1, max(most, count + 1), a.num_items + 1
    return 4 * threads * most * ((a.num_items + threads - 1) // threads) <= 5 * total


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    P, piece = a.T * a.S, max(1, NUMBERS_A_PIECE // a.D)
    starts, order, where = np.zeros(a.X + 2, np.int64), np.empty(P, np.int64), np.empty(P, np.int64)
    results, items = np.empty(P * a.D, np.float32), np.empty(a.X + P // ROWS, ITEM)
    a.order, a.where, a.results, a.items = order.ctypes.data, where.ctypes.data, results.ctypes.data, items.ctypes.data
    a.num_items = a.failed = 0
    if _sort(a, starts, order, where):
        return 1
    if _divide(a, starts, items, width(pool)):
        run(pool, a.compute, arguments, a.num_items, 1)
    else:
        memory, record = whole_lines(1, a.memory // 4), np.empty(a.most_words, np.int64)
        a.room = memory.ctypes.data
        for i in range(a.num_items):
            a.item = i
            run(pool, a.gather, arguments, items[i].count, piece)
            _make_calls(pool, a, items[i], a.room, record)
            run(pool, a.keep, arguments, items[i].count, piece)
        keep((memory, record))
    run(pool, a.add, arguments, a.T, piece)
    keep((starts, order, where, results, items))
    return int(a.failed)


class _Room(Arena):
    """Stands for memory that a driver will lend; it is never written."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self._buffers: list[Tensor] = []
        self._num_given = 0
        self._places = np.zeros((3, 0), np.int64)
        """The first address of each buffer, ascending, its end, and how far it is from the beginning."""

    def rewind(self) -> None:
        """Begin again: the next expert most likely asks for the same buffers."""
        self._num_given = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See ``Arena``."""
        for made in self._buffers[self._num_given : self._num_given + 1]:
            if made.shape == tuple(shape) and made.dtype == dtype:
                self._num_given += 1
                return made
        del self._buffers[self._num_given :]
        self._buffers.append(super().empty(shape, dtype))
        self._num_given += 1
        self._places = self._placed()
        return self._buffers[-1]

    def _placed(self) -> npt.NDArray[np.int64]:
        places, self.size = [], 0
        for buffer in self._buffers:
            places.append((buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, self.size))
            self.size += -(-buffer.nbytes // LINE) * LINE
        return np.array(sorted(places), np.int64).T

    def move(self, words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Write over addresses in this memory how far from its beginning they are; returns their places."""
        firsts, ends, offsets = self._places
        buffers = np.searchsorted(firsts, words, "right") - 1
        moved = ((buffers >= 0) & (words < ends[buffers])).nonzero()[0]
        words[moved] += (offsets - firsts)[buffers[moved]]
        return moved


class _Plan:
    """The calls of all experts."""

    def __init__(self, num_inputs: int) -> None:
        self.num_inputs = num_inputs
        self.memory = 0
        """Bytes that the driver lends."""
        self.most_words = 0
        self._experts: list[tuple[int, ...]] = []
        self._calls: list[tuple[int, ...]] = []
        self._words: list[npt.NDArray[np.int64]] = []
        self._moves: list[npt.NDArray[np.int64]] = []
        self._num_words = self._num_moves = 0
        self._tables: tuple[npt.NDArray[Any], ...] = ()

    def add(self, experts: SeparateExperts, index: int, room: _Room) -> bool:
        """Plan the calls of an expert; whether that was possible."""
        room.rewind()
        D = self.num_inputs
        with planning(room) as made:
            y_RD = experts.expert(index, torch.empty(ROWS, D))
        found = np.array([y_RD.data_ptr()])
        is_whole = y_RD.shape == (ROWS, D) and y_RD.dtype == torch.float32 and y_RD.is_contiguous()
        if made.foreign or not is_whole or not len(room.move(found)) or not all(map(_is_by_row, made.records)):
            return False
        first = len(self._calls)
        for driver_at, arguments, _ in made.records:
            self._add_call(driver_at, arguments, room)
        self._experts.append((first, len(self._calls), int(found[0])))
        self.memory = max(self.memory, room.size)
        return True

    def _add_call(self, driver_at: int, arguments: Arguments, room: _Room) -> None:
        words = arguments.view(np.int64).copy()
        moves, rows = room.move(words), list(arguments.dtype.names or ()).index("T")
        place = driver_at, self._num_words, len(words), rows, self._num_moves, self._num_moves + len(moves)
        self._calls.append(place)
        self._words.append(words)
        self._moves.append(moves)
        self._num_words, self._num_moves = self._num_words + len(words), self._num_moves + len(moves)
        self.most_words = max(self.most_words, len(words))

    def close(self) -> _Plan:
        """Finish the plan."""
        lists = np.concatenate(self._words), np.concatenate(self._moves)
        self._tables = np.array(self._experts, EXPERT), np.array(self._calls, CALL), *lists
        del self._experts, self._calls, self._words, self._moves
        return self

    def values(self) -> tuple[int, ...]:
        """What ARGUMENTS have of it."""
        experts, *others = self._tables
        listed = (value for table in others for value in (table.ctypes.data, len(table)))
        return len(experts), experts.ctypes.data, *listed, self.memory, self.most_words


def _is_by_row(record: tuple[int, Arguments, str]) -> bool:
    """Whether a call has a number of rows, on which nothing else in its arguments depends."""
    names = record[1].dtype.names or ()
    return "T" in names and int(record[1]["T"][0]) == ROWS


_PLANS: weakref.WeakKeyDictionary[SeparateExperts, _Plan | None] = weakref.WeakKeyDictionary()
"""``None`` for experts that cannot be planned, as they use operations of torch."""


def _plan_of(experts: SeparateExperts, num_inputs: int) -> _Plan | None:
    if experts not in _PLANS:
        plan, room = _Plan(num_inputs), _Room()
        is_whole = all(plan.add(experts, i, room) for i in range(experts.num_experts))
        return _PLANS.setdefault(experts, plan.close() if is_whole else None)
    return _PLANS[experts]


@sum_over_experts.kernel(device="cpu", name="numba", preference=10, supports=declines)
def sum_over_experts_numba(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: SeparateExperts, residual_TD: Tensor | None = None
) -> Tensor:
    """See ``ops.sum_over_experts``."""
    (T, D), S = x_TD.shape, ids_TS.shape[1]
    plan = None if is_wrapped() else _plan_of(experts, D)
    if plan is None:
        return sum_over_experts.reference(x_TD, ids_TS, shares_TS, experts, residual_TD)
    assert plan.num_inputs == D, f"the experts take {plan.num_inputs} columns, x has {D}"
    assert ids_TS.shape == shares_TS.shape == (T, S), f"ids {list(ids_TS.shape)}, shares {list(shares_TS.shape)}"
    assert ids_TS.dtype == torch.int64, f"ids are {ids_TS.dtype}, not int64"
    x, ids, shares = x_TD.contiguous(), ids_TS.contiguous(), shares_TS.float().contiguous()
    out_TD = torch.empty(T, D) if residual_TD is None else residual_TD
    assert out_TD.is_contiguous(), "the rows of the residual must follow one another"
    assert out_TD.shape == x.shape, f"the residual is {list(out_TD.shape)}, x {list(x.shape)}"
    assert out_TD.dtype == torch.float32, f"the residual is {out_TD.dtype}, x float32"
    tasks = _gather_task(), _keep_task(), _compute_task(), _add_task()
    error = f"sum_over_experts: ids of experts must be from 0 to {experts.num_experts - 1}, or -1"
    for first in range(0, T, RESULT_ROWS):
        parts = [rows if rows is None else rows[first : first + RESULT_ROWS] for rows in (x, ids, shares, residual_TD)]
        places = *map(address, parts), out_TD[first:].data_ptr(), min(T - first, RESULT_ROWS)
        call(_driver(), ARGUMENTS, (*places, D, S, *plan.values(), *tasks, *[0] * 8), error)
    return out_TD
