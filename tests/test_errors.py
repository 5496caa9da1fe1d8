"""Errors of one kind in place of any other."""

from __future__ import annotations

import asyncio

import pytest

from octavo.errors import ConfigError, failures_as, first_line_of


class Panic(BaseException):
    """As a library in Rust raises."""


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (ValueError("wrong"), ConfigError),
        (StopIteration(), ConfigError),
        (Panic(), ConfigError),
        (MemoryError(), MemoryError),
        (asyncio.CancelledError(), asyncio.CancelledError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_failures_become_another_error_and_cancellations_none(
    raised: BaseException, found: type[BaseException]
) -> None:
    with pytest.raises(found), failures_as(lambda error: ConfigError(repr(error)), MemoryError):
        raise raised


def test_the_first_line_with_words_tells_of_an_error() -> None:
    assert first_line_of(ValueError("\n  one\ntwo")) == "one"
    assert first_line_of(ValueError()) == "ValueError"
