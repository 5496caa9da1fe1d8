"""One setting: its default, what is allowed, and how a value from anywhere is read."""

from __future__ import annotations

import json
import typing
from dataclasses import field
from typing import Any

from octavo.errors import ConfigError

SECRETS = frozenset({"api_key", "admin_key"})
"""Settings that are never shown."""


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    is_json: bool = False,
) -> Any:
    """A dataclass field with what a command line needs to know about it; values go from ``low`` to ``high``.

    With ``is_json`` the value is JSON, and a mapping in Python or YAML stands for it.
    """
    return field(
        default=default, metadata={"help": help, "choices": choices, "low": low, "high": high, "is_json": is_json}
    )


class Setting(typing.NamedTuple):
    """One setting as a command line sees it."""

    name: str
    group: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    is_json: bool

    def parse(self, value: Any) -> Any:
        """Convert a value from Python, YAML, a flag or an environment variable; raise ``ConfigError``."""
        if value is None and self.optional:
            return None
        if self.is_json and isinstance(value, dict):
            value = json.dumps(value)
        try:
            result = _convert(value, self.type)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.name}: expected {self.type.__name__}, got {value!r}") from None
        if self.choices and result not in self.choices:
            raise ConfigError(f"{self.name}: {value!r} is not one of {', '.join(self.choices)}")
        if self.low is not None and not result >= self.low:
            raise ConfigError(f"{self.name}: must be at least {self.low:g}, got {value!r}")
        if self.high is not None and not result <= self.high:
            raise ConfigError(f"{self.name}: must be at most {self.high:g}, got {value!r}")
        return result


def _convert(value: Any, kind: type) -> Any:
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ValueError
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    if kind is str and not isinstance(value, str):
        value = str(value) if hasattr(value, "__fspath__") else value
        if not isinstance(value, str):
            raise TypeError
    return kind(value)
