"""The parts that an ``Engine`` is given."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any, Protocol

from octavo.cache.kv_events import KVEvent
from octavo.cache.offload import Identity
from octavo.config import EngineConfig
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.request_events import Event
from octavo.types import (
    EngineInfo,
    EngineStats,
    JoinGroup,
    Masks,
    MemoryPart,
    Output,
    Plan,
    ReceiveTensors,
    Request,
    Sampled,
    WeightOrder,
)

OnLost = Callable[[int], None]
"""Called when another process that computes for an engine ends, with its exit status."""


class SubmittedStep(Protocol):
    """A submitted step."""

    @property
    def is_started(self) -> bool:
        """Whether the device computes it now or next, before ``sample`` is called."""
        ...

    def sample(self, masks: Masks) -> list[Sampled]:
        """Wait for the step and return one ``Sampled`` per ``Scheduled``; raises ``RunnerError`` if it failed."""
        ...


class Runner(Protocol):
    """Computes plans."""

    def submit(self, plan: Plan) -> SubmittedStep:
        """Start computing ``plan``; never wait for the device."""
        ...


class Sleeper(Protocol):
    """Frees the memory of the device while nothing is computed."""

    def sleep(self) -> None:
        """Free the device's memory until ``wake``; cached blocks lose their content. Raises ``RunnerError``, and then
        nothing is changed."""
        ...

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """Undo ``sleep`` for parts of the memory, one of which is asleep. Raises an error if the device's memory is in
        use; the engine is then unusable."""
        ...


class WeightChanger(Protocol):
    """Changes the weights of the model while nothing is computed."""

    identity: Identity
    """Names the weights, and whatever else keys and values depend on besides tokens."""

    def load(self, folder: str, files: SequenceOf[str]) -> None:
        """See ``LoadWeights``. Raises ``CheckpointError``, and then nothing is changed."""
        ...

    @property
    def receiver(self) -> TensorReceiver: ...

    def checksums(self) -> dict[str, str]: ...


class TensorReceiver(Protocol):
    """Receives tensors that a trainer broadcasts, one order after the other, while steps are computed."""

    @property
    def is_busy(self) -> bool: ...

    def join(self, group: JoinGroup) -> None: ...
    def receive(self, tensors: ReceiveTensors) -> None: ...
    def drop(self, leaves_group: bool) -> None: ...

    def check(self) -> None:
        """Raise ``CheckpointError`` if an order failed since the last call."""
        ...

    def files(self) -> list[str]:
        """Paths of files with what was received, until ``drop``. Raises ``CheckpointError`` if that is nothing."""
        ...


class Grammars(Protocol):
    """Structured output: masks of the tokens that each sequence may sample next."""

    def prepare(self, request: Request) -> Future[Any]:
        """Start to compile the grammar of ``request``, which has one; never wait."""
        ...

    def masks(self, plan: Plan) -> Masks:
        """Masks for the sequences of ``plan`` that need one, given their tokens so far; never wait."""
        ...


class Adapters(Protocol):
    """LoRA adapters that requests may name."""

    def __contains__(self, name: str) -> bool: ...

    def load(self, name: str, path: str) -> None:
        """Load the adapter in the folder ``path``; raises ``CheckpointError``."""
        ...

    def unload(self, name: str) -> None:
        """Unload an adapter that no request uses any more."""
        ...


class EngineLike(Protocol):
    """What an engine process runs: ``octavo.engine.Engine``, or what a backend has in its place."""

    @property
    def adapters(self) -> Adapters: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: int) -> None: ...
    def spare_seconds(self) -> float: ...
    def step(self) -> list[Output]: ...
    def stats(self) -> EngineStats: ...
    def cache_view(self) -> CacheView | None: ...
    def take_events(self) -> list[Event]: ...
    def take_kv_events(self) -> list[KVEvent]: ...
    def clear_cache(self) -> None: ...
    def order_sessions(self, order: SessionOrder) -> SessionReport: ...
    def order_weights(self, order: WeightOrder) -> bool: ...
    def checksums(self) -> dict[str, str]: ...
    def save_idle(self) -> bool: ...
    def sleep(self) -> None: ...
    def wake(self, parts: Collection[MemoryPart]) -> None: ...
    def close(self) -> None: ...


class EngineBackend(Protocol):
    """Builds what takes the place of the engine; a module."""

    def build(self, config: EngineConfig, on_lost: OnLost | None = None) -> tuple[Any, EngineInfo]:
        """An ``EngineLike``; for programs that have the engine in their process, an ``Engine``. Raises ``ConfigError``
        or ``CheckpointError``."""
        ...
