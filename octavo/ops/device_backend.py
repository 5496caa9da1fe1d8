"""What the engine asks of a type of device besides torch: the kernels of ops, and what comes with them.

A backend is a plug-in (``octavo.plugins.KERNELS``). This class is one for which torch alone computes; a backend
overrides what it has more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo import plugins
from octavo.ops.collective import Collective

Check = Callable[[], None]
"""Called now and then while a rank waits for another; raises when waiting is in vain."""


class Recording(Protocol):
    """Kernel calls that were made once, and can be made again over the same memory."""

    foreign: set[str]
    """Operations that cannot be repeated; the recording is of no use if there are any."""

    def repeat(self) -> None: ...


Recorder = Callable[[], AbstractContextManager[Recording]]
"""Makes blocks of which the kernel calls are recorded, all with results in one memory."""


class Tuner(Protocol):
    """Measures kernels for the matrix products of a model."""

    def prepare(self, rows: int, again: bool, seconds: float) -> list[str]:
        """Compile what is to be measured for a number of rows, for about ``seconds``; returns names for ``measure``."""
        ...

    def measure(self, name: str) -> Mapping[str, Any] | None: ...


IDLE, WORKS, WAITS = range(3)
"""What a rank does: nothing; a message; or it waits for stage s to get on with one: WAITS + s."""


class MessageWriter(Protocol):
    def write(self, message: bytes) -> None: ...


class MessageReader(Protocol):
    def next(self) -> bytes: ...


Way = tuple[int, int]
"""From a rank to one that reads what its stage has computed."""


class RankMemory(Protocol):
    """One rank's view of the memory that the ranks of an engine share, or those of them that are on this host."""

    rank: int
    size: int
    """Ranks on all hosts."""
    num_stages: int
    channel_bytes: int
    """Bytes that a stage can hand on before the next one takes them."""
    compared: Sequence[int]
    """Ranks whose digests are here: those of this host, and rank 0."""

    @property
    def crossing(self) -> Sequence[Way]:
        """Ways from one host to another."""
        ...

    def node_of(self, rank: int) -> int:
        """The number of a rank's host."""
        ...

    @property
    def stage(self) -> int:
        """The number of this rank's stage."""
        ...

    @property
    def collective(self) -> Collective:
        """That of all ranks."""
        ...

    @property
    def within(self) -> Collective:
        """That of the ranks of this rank's stage."""
        ...

    def to_stages(self, check: Check) -> Sequence[MessageWriter]:
        """Of what this rank's stage has computed, to the next stage, or from the last to each other."""
        ...

    def from_stage(self, stage: int, check: Check) -> MessageReader:
        """Of what a stage has computed, the one before this rank's or the last."""
        ...

    def writer_of(self, way: Way, check: Check) -> MessageWriter: ...
    def reader_of(self, way: Way, check: Check) -> MessageReader: ...
    def note(self, activity: int) -> None:
        """Let others know what this rank does."""
        ...

    def progress(self, rank: int) -> tuple[object, bool]:
        """What a rank has done, and whether others wait for it."""
        ...

    def abort(self) -> None:
        """Make all exchanges fail, now and later."""
        ...

    def writer(self, check: Check) -> MessageWriter:
        """Of messages that all other ranks of this host read; one process alone has one."""
        ...

    def reader(self, check: Check) -> MessageReader: ...
    def write_digest(self, rank: int, number: int, digest: int) -> None: ...
    def digest(self, rank: int, number: int) -> int: ...


class SharedMemory(Protocol):
    """Memory of ranks by a file descriptor, without a name."""

    def make(self, size: int, descriptor: int | None = None, num_stages: int = 1) -> int:
        """The descriptor of a new one for ``size`` ranks of so many stages, in an empty file if the descriptor of one
        is given."""
        ...

    def view(self, descriptor: int, rank: int, size: int, num_stages: int = 1, num_nodes: int = 1) -> RankMemory: ...


class DeviceBackend:
    """See the module's docstring."""

    keeps_marked_states = False
    """Whether ops with recurrent state can keep it after any row (``StateRows.marks_T``). Otherwise steps end there."""

    def declines(self) -> str | None:
        """Why it cannot be used on this machine, or ``None``: then the next backend for the type of device is."""
        return None

    def load_kernels(self) -> None:
        """Import the kernels, which register themselves with their ops."""

    def start_loading(self, kernel_cache: str | None = None) -> None:
        """Import the kernels and prepare their compiler in the background, while weights are loaded. Those of a file of
        ``pack_kernels``, this one or the shipped one, need not be compiled."""

    def compiling_in_background(self, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
        """While the block runs, compile the slowest kernels for a KV cache of this type elsewhere."""
        return nullcontext()

    def compile_rare(self) -> None:
        """Compile the kernels that only some requests use: the others would wait for the first of those."""

    def set_num_threads(self, count: int) -> None:
        """Compute with so many threads of the host."""
        torch.set_num_threads(count)

    def torch_threads(self) -> AbstractContextManager[None]:
        """In this block torch computes with all of these threads: for large operations that have no kernel."""
        return nullcontext()

    def describe(self) -> Iterator[tuple[str, str]]:
        """What ``octavo doctor`` shows of the device: names and values."""
        yield from ()

    def pack_kernels(self, path: Path, device: torch.device) -> int:
        """Write all kernels that were compiled, and what was measured, to a file; returns how many files are in it."""
        return 0

    def compiled_kernels(self) -> Path | None:
        """The folder where compiled kernels of this version are kept; next to it, those of other versions."""
        return None

    # ---- around steps

    def launched_early(self) -> AbstractContextManager[None]:
        """Kernels launched in this block may start before the previous one ends."""
        return nullcontext()

    def batch_invariant(self) -> AbstractContextManager[None]:
        """In this block a row's result does not depend on the other rows, to the bit."""
        return nullcontext()

    def without_grid_barriers(self) -> AbstractContextManager[None]:
        """No kernel of this block waits for all of its programs: another executor of the device may launch one."""
        return nullcontext()

    def compiled_only(self, num_threads: int | None = None) -> AbstractContextManager[None] | None:
        """In this block kernels are compiled, ``num_threads`` at a time, and none is run; ``None`` if none needs it."""
        return None

    def recorder(self) -> Recorder | None:
        """A new recorder; ``None`` if calls cannot be recorded."""
        return None

    # ---- choice of kernels

    def tuner(self, run: Callable[[], None], device: torch.device) -> Tuner | None:
        """Of the products of ``run``, which is called once, without launching a kernel."""
        return None

    def use_measured(self, entries: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
        """Use measured kernels from now on, and keep them for the next start."""

    def measurements(self, device: torch.device) -> Path | None:
        """Where measured kernels are kept."""
        return None

    # ---- several processes

    def peer_collective(self, host: Collective, device: torch.device) -> Collective | None:
        """A collective over memory that ranks map from each other; ``None`` if they cannot."""
        return None

    def peer_bytes(self, num_ranks: int) -> int:
        """Bytes of each rank that the others map."""
        return 0

    def shared_memory(self) -> SharedMemory | None:
        """What ranks on this host share."""
        return None


@functools.cache
def backend_of(device_type: str) -> DeviceBackend:
    """The backend of a type of device."""
    for name, part in reversed(list(plugins.parts(plugins.KERNELS).items())):
        if name.partition(".")[0] == device_type:
            backend: DeviceBackend = part.load()
            if backend.declines() is None:
                return backend
    return DeviceBackend()


def is_gpu(x: Tensor | torch.device) -> bool:
    """Whether a tensor or a device is a GPU's."""
    return (x.device if isinstance(x, Tensor) else x).type == plugins.GPU
