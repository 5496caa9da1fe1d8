"""The adapters that requests may ask for by name, and the numbers by which an executor knows them."""

from __future__ import annotations

from octavo.engine.step_runner import StepRunner
from octavo.errors import CheckpointError
from octavo.steps.messages import LoadAdapter, UnloadAdapter


class LoadedAdapters:
    """Adapters of an executor; ``numbers`` has those that are loaded."""

    def __init__(self, runner: StepRunner, numbers: dict[str, int], max_adapters: int) -> None:
        """``numbers`` is empty, and shared with the encoder of steps."""
        self._runner = runner
        self.numbers = numbers
        self._max_adapters = max_adapters

    def __contains__(self, name: str) -> bool:
        return name in self.numbers

    def load(self, name: str, path: str) -> None:
        """Load the adapter in the folder ``path``, or nothing of it. Raises ``CheckpointError``."""
        if name in self:
            raise CheckpointError(f"an adapter called {name} is loaded already")
        if len(self.numbers) >= self._max_adapters:
            raise CheckpointError(f"{self._max_adapters} adapters are loaded already, as many as max_loras allows")
        number = min(set(range(self._max_adapters)) - set(self.numbers.values()))
        self._runner.send(LoadAdapter(number, path)).wait()
        self.numbers[name] = number

    def unload(self, name: str) -> None:
        """Forget an adapter that no request needs any more."""
        if name in self:
            self._runner.send(UnloadAdapter(self.numbers.pop(name))).wait()
