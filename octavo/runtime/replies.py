"""Executor replies that are complete when ``send`` returns."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Done(Generic[T]):
    """A completed reply."""

    def __init__(self, answer: T) -> None:
        self._answer = answer

    def wait(self) -> T:
        """See ``Reply``."""
        return self._answer


class FailedReply:
    """A reply that failed."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> Any:
        """Raise the error."""
        raise self._error
