"""Answers of executors that are there when ``send`` returns."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Done(Generic[T]):
    """An answer."""

    def __init__(self, answer: T) -> None:
        self._answer = answer

    def wait(self) -> T:
        """See ``Reply``."""
        return self._answer


class Failed:
    """An error in place of an answer."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> Any:
        """Raise it."""
        raise self._error
