"""Kernel dispatch: an op is a contract with a plain-torch reference, a kernel is one implementation of it.

``@op`` on the reference makes an ``Op``, called like that function. Kernels of the same signature are registered on it
by the ``DeviceBackend`` of a type of device, at the first call with a tensor there::

    @rms_norm.kernel(device="cpu", name="numba", preference=10, supports=only_float32)
    def rms_norm_numba(x_TD, weight_D, eps): ...

The first tensor argument decides: for its device and dtype the kernel of the highest ``preference`` that does not
decline is chosen once and cached; if all decline, the reference runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from octavo.ops.device_backend import backend_of

P = ParamSpec("P")
R = TypeVar("R")
Supports = Callable[[torch.dtype], str | None]

REFERENCE = "reference"

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class KernelChoice(NamedTuple):
    """One implementation of one op, and whether it is chosen; ``octavo doctor`` prints these."""

    op: str
    kernel: str
    chosen: bool
    reason: str
    """Why it is not chosen; empty when it is."""


@dataclass(frozen=True)
class Kernel(Generic[P, R]):
    """One implementation of an op on one type of device."""

    name: str
    device: str
    preference: int
    supports: Supports
    run: Callable[P, R]


class Op(Generic[P, R]):
    """An operation: its reference and its kernels. See the module's docstring."""

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.name = reference.__name__
        self.reference = reference
        self.takes_ids = False
        """Whether the first argument has ids or positions, which are int64 whatever the model's dtype is."""
        self.kernels: list[Kernel[P, R]] = []
        self._chosen: dict[tuple[str, torch.dtype], Callable[P, R]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0]
        assert isinstance(x, torch.Tensor), f"{self.name}: the first argument must be a tensor"
        key = (x.device.type, x.dtype)
        run = self._chosen.get(key)
        if run is None:
            run = self._chosen[key] = self._choose(*key)
        return run(*args, **kwargs)

    def kernel(
        self, *, device: str, name: str, preference: int, supports: Supports
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register the decorated function. ``supports(dtype)`` returns why it declines, or ``None``."""

        def register(run: Callable[P, R]) -> Callable[P, R]:
            assert name != REFERENCE, "this name is the reference's own"
            self.kernels.append(Kernel(name, device, preference, supports, run))
            self.kernels.sort(key=lambda kernel: -kernel.preference)
            self._chosen.clear()
            return run

        return register

    def choices(self, device: str, dtype: torch.dtype) -> list[KernelChoice]:
        """Every implementation for this device and dtype, the chosen one and the declined ones with reasons."""
        _load_kernels(device)
        found: list[KernelChoice] = []
        winner: str | None = None
        for kernel in self.kernels:
            if kernel.device != device:
                continue
            reason = self._declines(kernel, dtype) or (f"{winner} is preferred" if winner else "")
            winner = winner or (None if reason else kernel.name)
            found.append(KernelChoice(self.name, kernel.name, not reason, reason))
        found.append(KernelChoice(self.name, REFERENCE, winner is None, f"{winner} is preferred" if winner else ""))
        return found

    def chosen(self, device: str, dtype: torch.dtype) -> str:
        """Name of the implementation that runs for tensors of this device and dtype."""
        return next(choice.kernel for choice in self.choices(device, dtype) if choice.chosen)

    def _choose(self, device: str, dtype: torch.dtype) -> Callable[P, R]:
        name = self.chosen(device, dtype)
        run = self.reference
        if name != REFERENCE:
            run = next(kernel.run for kernel in self.kernels if (kernel.name, kernel.device) == (name, device))
        return run if OPS.wrap is None else OPS.wrap(self.name, run)

    def _declines(self, kernel: Kernel[P, R], dtype: torch.dtype) -> str | None:
        if OPS.only is not None and kernel.name != OPS.only:
            return f"only {OPS.only} is allowed now"
        return kernel.supports(dtype)


class Ops:
    """The ops of this process by name, and temporary overrides of the choice of their kernels.

    A process has one, ``OPS``: ops and kernels register themselves when their modules are imported.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Op[Any, Any]] = {}
        self.only: str | None = None
        """If set, only kernels of this name run, and references for all other ops."""
        self.wrap: Wrap | None = None

    def forget_choices(self) -> None:
        """Clear the cache, so that every op chooses its kernel again at its next call."""
        for item in self.by_name.values():
            item._chosen.clear()


OPS = Ops()


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Make an op from a plain-torch function whose first argument is a tensor."""
    assert reference.__name__ not in OPS.by_name, f"two ops are called {reference.__name__}"
    made = OPS.by_name[reference.__name__] = Op(reference)
    return made


def op_of_ids(reference: Callable[P, R]) -> Op[P, R]:
    """Like ``op``, for a function whose first argument has ids or positions."""
    made = op(reference)
    made.takes_ids = True
    return made


def choices(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[KernelChoice]:
    """The choices for a model of this dtype on this device, for every imported op."""
    ops = (OPS.by_name[name] for name in sorted(OPS.by_name))
    return [choice for item in ops for choice in item.choices(device, torch.int64 if item.takes_ids else dtype)]


def only(name: str) -> contextlib.AbstractContextManager[None]:
    """Within this block run only kernels of this name, and references for ops without one (for tests)."""
    return _choosing(only=name)


def wrapped(wrap: Wrap) -> contextlib.AbstractContextManager[None]:
    """Within this block run ``wrap(op's name, implementation)`` in place of every implementation (for profilers)."""
    return _choosing(wrap=wrap)


@contextlib.contextmanager
def _choosing(**rules: Any) -> Iterator[None]:
    before = {name: getattr(OPS, name) for name in rules}
    vars(OPS).update(rules)
    OPS.forget_choices()
    try:
        yield
    finally:
        vars(OPS).update(before)
        OPS.forget_choices()


def is_wrapped() -> bool:
    """Whether ops are wrapped one by one, so that several must not be fused."""
    return OPS.wrap is not None


@functools.cache
def _load_kernels(device: str) -> None:
    """Import the kernels for a type of device, once; they register themselves."""
    backend_of(device).load_kernels()
