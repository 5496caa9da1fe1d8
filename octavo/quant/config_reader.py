"""Reads the keys of a ``quantization_config``; errors name the key and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from octavo.errors import CheckpointError

INSTEAD = "Use a checkpoint of this model that is not quantised, or a GGUF file of it"
PAIR = re.compile(r"[0-9]{1,8}x[0-9]{1,8}")


class QuantKeys:
    """One object of the configuration. A null key counts as absent. Methods raise ``CheckpointError``."""

    def __init__(self, values: Mapping[str, Any], path: str = "quantization_config") -> None:
        self._values = values
        self._path = path

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value."""
        value = self._values.get(key)
        return default if value is None else value

    def wrong(self, key: str, allowed: str, instead: str = "") -> CheckpointError:
        """The error for a key whose value is not allowed."""
        found = f"config: {self._path}.{key} is {self._values.get(key)!r}; it must be {allowed}"
        return CheckpointError(f"{found}. {instead}" if instead else found)

    def integer(self, key: str, allowed: Collection[int], default: int | None = None) -> int:
        """One of these integers."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            shown = f"from {allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else _either(map(str, allowed))
            raise self.wrong(key, shown)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def word(
        self,
        key: str,
        allowed: Collection[str],
        default: str | None = None,
        instead: str = INSTEAD,
        any_case: bool = False,
    ) -> str:
        """One of these words; ``instead`` says what works in place of another. ``any_case``: as lower case."""
        value = self.get(key, default)
        if any_case and isinstance(value, str):
            value = value.lower()
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, _either(allowed), instead)
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of module names or patterns, empty if absent."""
        found = self.get(key, ())
        if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
            raise self.wrong(key, "a list of module names")
        return tuple(found)

    def child(self, key: str) -> QuantKeys | None:
        """A nested object, ``None`` if absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return QuantKeys(value, f"{self._path}.{key}")

    def children(self) -> Iterator[tuple[str, QuantKeys]]:
        """The keys and their values, which must be objects."""
        for key in self._values:
            yield key, self.child(key) or QuantKeys({}, f"{self._path}.{key}")

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive integers, as a list or like "128x128"; ``None`` if absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str) and PAIR.fullmatch(value):
            value = [int(size) for size in value.split("x")]
        if not isinstance(value, list | tuple) or len(value) != 2 or not all(_is_size(size) for size in value):
            raise self.wrong(key, "a list of two positive integers")
        return value[0], value[1]

    def refuse(self, key: str, what: str, instead: str = INSTEAD) -> None:
        """Raise if the key is there and not empty; ``what`` says what is not supported."""
        if value := self.get(key):
            shown = value if isinstance(value, str | bool | int) else "given"
            raise CheckpointError(f"config: {self._path}.{key} is {shown}: {what} is not supported. {instead}")


def _either(words: Collection[str] | Iterator[str]) -> str:
    return " or ".join(words)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 24
