"""The parts that an ``Engine`` is given."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from octavo.types import Masks, Plan, Request, Sampled


class Pending(Protocol):
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

    def submit(self, plan: Plan) -> Pending:
        """Start computing ``plan``; never wait for the device."""
        ...


class Sleeper(Protocol):
    """Frees the memory of the device while nothing is computed."""

    def sleep(self) -> None:
        """Free the device's memory until ``wake``; cached blocks lose their content. Raises ``RunnerError``, and then
        nothing is changed."""
        ...

    def wake(self) -> None:
        """Undo ``sleep``. Raises an error if the device's memory is in use; the engine is then unusable."""
        ...

    def close(self) -> None:
        """Do nothing more with the device of its own accord, from now on; see ``StepRunner.close``."""
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
