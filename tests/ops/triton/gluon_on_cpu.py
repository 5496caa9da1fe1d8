"""Runs kernels in Gluon without a GPU: their functions as Python, on torch tensors.

Programs run one after another. One whose warps are specialised is two threads, the consumers and the producer, which
wait for each other at barriers as on a GPU. Copies and products are over at once, so that what goes wrong only if they
are late is not found here; nor are layouts, which say which thread has what.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.triton.ptx import Registers, halves, packed

SECONDS = 20.0
LAYOUTS = (
    *("SliceLayout", "BlockedLayout", "DistributedLinearLayout", "NVMMADistributedLayout", "DotOperandLayout"),
    *("SwizzledSharedLayout", "SharedLinearLayout"),
)
TYPES = ("float32", "bfloat16", "int16", "int32", "int64")


class Value(torch.Tensor):
    """A tensor with the methods of those of a kernel; assignments such as ``+=`` leave others as they are."""

    type = property(lambda self: SimpleNamespace(layout=None))  # type: ignore[assignment]

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other

    def split(self) -> tuple[Any, Any]:  # type: ignore[override]
        return self[..., 0], self[..., 1]


def value(tensor: Any) -> Value:
    return torch.as_tensor(tensor).as_subclass(Value)


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, tensor: torch.Tensor, places: Any = 0) -> None:
        self.tensor, self.places = tensor, places
        self.dtype = SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, places: Any) -> Pointer:
        return Pointer(self.tensor, self.places + places)

    def load(self, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Value:
        places = torch.as_tensor(self.places)
        inside = torch.as_tensor(True if mask is None else mask).broadcast_to(places.shape)
        found = self.tensor.view(-1)[torch.where(inside, places, 0).long()]
        return value(torch.where(inside, found, torch.tensor(other, dtype=found.dtype)))

    def store(self, numbers: Any, mask: Any = None) -> None:
        places = torch.as_tensor(self.places)
        inside = torch.as_tensor(True if mask is None else mask).broadcast_to(places.shape)
        numbers = torch.as_tensor(numbers, dtype=self.tensor.dtype).broadcast_to(places.shape)
        self.tensor.view(-1)[places[inside].long()] = numbers[inside]

    def atomic_add(self, amount: int, sem: str, scope: str) -> Value:
        found = self.load().clone()
        self.store(found + amount)
        return found


class Shared:
    """A tensor in shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape = tensor, tensor.shape

    def index(self, place: Any) -> Shared:
        return Shared(self.tensor[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.tensor.view(shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(order))

    def load(self, layout: Any) -> Value:
        return value(self.tensor.clone())

    def store(self, numbers: Any) -> None:
        assert numbers.shape == self.tensor.shape
        self.tensor.copy_(numbers)

    def copy_from(self, pointer: Pointer, mask: Any, **options: Any) -> None:
        places = torch.as_tensor(pointer.places)
        assert places.shape == self.tensor.shape
        self.tensor.copy_(torch.where(torch.as_tensor(mask), pointer.load(mask=mask), self.tensor))


class Barrier:
    """Signals when it has been arrived at, and all bytes that were expected have come."""

    def __init__(self) -> None:
        self.changed, self.phase, self.arrivals, self.num_bytes = threading.Condition(), 0, 1, 0

    def add(self, arrivals: int, num_bytes: int) -> None:
        with self.changed:
            self.arrivals, self.num_bytes = self.arrivals - arrivals, self.num_bytes + num_bytes
            if self.arrivals == 0 and self.num_bytes == 0:
                self.phase, self.arrivals = self.phase + 1, 1
                self.changed.notify_all()

    def wait(self, parity: Any) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (self.phase - 1) % 2 == int(parity), SECONDS), "waits for ever"


class Copied:
    """A tensor that boxes are copied from; what is beyond its ends is 0."""

    def __init__(self, descriptor: Any) -> None:
        self.tensor = descriptor.base.view(*descriptor.shape)
        self.block_shape, self.layout, self.dtype = descriptor.block_shape, None, descriptor.base.dtype
        size = math.prod(self.block_shape) * descriptor.base.element_size()
        self.block_type = SimpleNamespace(nbytes=size)

    def copy(self, at: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        begin = [int(first) for first in at]
        assert all(first >= 0 for first in begin)
        sides = zip(begin, self.block_shape, self.tensor.shape, strict=True)
        inside = self.tensor[tuple(slice(first, min(first + size, end)) for first, size, end in sides)]
        to.tensor.zero_()
        to.tensor[tuple(slice(0, size) for size in inside.shape)] = inside
        barrier.add(0, -self.block_type.nbytes)


class Kernel:
    """What the functions of a program, which are in these modules, find in place of Gluon's."""

    def __init__(self, *modules: ModuleType) -> None:
        self.modules, self.program, self.programs = modules, value(0), value(0)
        self.language = SimpleNamespace(
            **{name: getattr(torch, name) for name in TYPES},
            **dict.fromkeys(LAYOUTS, lambda *args: None),
            arange=lambda begin, end, layout: value(torch.arange(begin, end)),
            zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
            minimum=lambda a, b: value(min(int(a), int(b))) if torch.as_tensor(a).ndim == 0 else a.clamp(max=b),
            maximum=lambda a, b: value(max(int(a), int(b))),
            load=lambda pointer, **options: pointer.load(**options),
            where=torch.where,
            sum=lambda numbers, axis, keep_dims=False: value(torch.sum(numbers, axis, keepdim=keep_dims)),
            rsqrt=torch.rsqrt,
            to_tensor=value,
            convert_layout=lambda numbers, layout: numbers,
            store=lambda pointer, *args, **options: pointer.store(*args, **options),
            atomic_add=lambda pointer, *args, **options: pointer.atomic_add(*args, **options),
            program_id=lambda axis: self.program,
            num_programs=lambda axis: self.programs,
            static_range=range,
            thread_barrier=lambda: None,
            inline_asm_elementwise=_assembly,
            allocate_shared_memory=_allocate,
            warp_specialize=_specialize,
        )
        self.names: dict[str, Any] = {
            "gl": self.language,
            "tma": SimpleNamespace(async_copy_global_to_shared=lambda copied, at, bar, to: copied.copy(at, bar, to)),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: Barrier,
                init=lambda barrier, count: None,
                expect=lambda barrier, num_bytes: barrier.add(1, num_bytes),
                wait=lambda barrier, parity: barrier.wait(parity),
                arrive=lambda barrier, pred: barrier.add(1, 0) if pred else None,
            ),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=lambda to, pointer, **options: to.copy_from(pointer, **options),
                commit_group=lambda: None,
                wait_group=lambda count: None,
            ),
            "mma_v2": lambda left, right, sums: value(sums + left.float() @ right.float()),
            "warpgroup_mma": _multiply,
            "warpgroup_mma_init": lambda sums: sums,
            "warpgroup_mma_wait": lambda count, deps: deps,
            "fence_async_shared": lambda: None,
            "finish": _finish,
        }

    def launch(self, kernel: Any, grid: tuple[int], *args: Any, **options: Any) -> None:
        """In place of ``launch``: run the programs, the last one first."""
        given = [_given(arg) for arg in args]
        options = {name: option for name, option in options.items() if name not in ("num_warps", "maxnreg")}
        with pytest.MonkeyPatch.context() as patch:
            for module in self.modules:
                for name, item in list(vars(module).items()):
                    plain = self.names.get(name, getattr(item, "fn", getattr(item, "value", item)))
                    patch.setattr(module, name, plain)
            self.programs = value(grid[0])
            for program in reversed(range(grid[0])):
                self.program = value(program)
                kernel.fn(*given, **options, PDL=False)


def _given(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return Pointer(arg)
    return value(arg) if isinstance(arg, int | float) else None if arg is None else Copied(arg)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout is Barrier:
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda place: barriers[int(place)])
    return Shared(torch.zeros(shape, dtype=dtype))


def _specialize(partitions: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    failures: list[BaseException] = []

    def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            function(*args)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _assembly(text: str, constraints: str, operands: list[Any], dtype: torch.dtype, is_pure: bool, pack: int) -> Value:
    registers = [
        packed(operand.as_subclass(torch.Tensor).unflatten(-1, (-1, 2)), operand.dtype) for operand in operands
    ]
    return value(halves(Registers(registers).run(text), dtype).flatten(-2).to(dtype))


def _multiply(left: Value, right: Shared, sums: Value, use_acc: Any, is_async: bool) -> Value:
    product = left.float() @ right.tensor.float()
    return value(sums + product if use_acc else product)


def _finish(
    acc: Any, up: Any, residual: Any, outputs: Any, num_outputs: Any, bias_ptr: Pointer | None, ACTIVATION: str | None,
    ALPHA: float = 0.0, LIMIT: float = 0.0,
) -> Any:  # fmt: skip
    """As ``tile_epilogue.finish``, which is tested in Triton's interpreter."""
    inside = outputs < num_outputs
    if bias_ptr is not None:
        acc = acc + (bias_ptr + outputs).load(mask=inside).float()[:, None]
        up = up + (bias_ptr + outputs + num_outputs).load(mask=inside).float()[:, None] if ACTIVATION else up
    if ACTIVATION == "clamped_swish":
        acc = acc.clamp(max=LIMIT)
        acc = acc * torch.sigmoid(ALPHA * acc) * (up.clamp(-LIMIT, LIMIT) + 1)
    elif ACTIVATION is not None:
        assert ACTIVATION == "silu"
        acc = torch.nn.functional.silu(acc) * up
    return acc + residual
