"""LoRA adapters: requests name them, messages to the executor number them."""

from __future__ import annotations

from octavo.engine.runner.step_runner import StepRunner
from octavo.errors import CheckpointError
from octavo.steps.messages import Executor, LoadAdapter, UnloadAdapter


class LoadedAdapters:
    """The adapters loaded by an executor; ``numbers`` maps their names to numbers below ``max_adapters``."""

    def __init__(self, runner: StepRunner | Executor, numbers: dict[str, int], max_adapters: int) -> None:
        """``numbers`` is empty, and shared with what writes an adapter's number into messages."""
        self._runner = runner
        self.numbers = numbers
        self._max_adapters = max_adapters

    def __contains__(self, name: str) -> bool:
        return name in self.numbers

    def load(self, name: str, path: str) -> None:
        """Load the adapter in the folder ``path``; raises ``CheckpointError``, and then nothing is loaded."""
        if name in self:
            raise CheckpointError(f"an adapter called {name} is loaded already")
        if len(self.numbers) >= self._max_adapters:
            raise CheckpointError(f"{self._max_adapters} adapters are loaded already, as many as max_loras allows")
        number = min(set(range(self._max_adapters)) - set(self.numbers.values()))
        self._runner.send(LoadAdapter(number, path)).wait()
        self.numbers[name] = number

    def unload(self, name: str) -> None:
        """Unload an adapter that no request uses any more."""
        if name in self:
            self._runner.send(UnloadAdapter(self.numbers.pop(name))).wait()
