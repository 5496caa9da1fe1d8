"""What is fuzzed: a function that reads bytes, and may do nothing but return."""

from __future__ import annotations

import json
import random
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import mutate_bytes, mutate_json


class Fault(Exception):
    """What was read did something that it must not."""


class Target(ABC):
    """A reader of untrusted input."""

    seeds: list[bytes]
    """Valid inputs, from which others are made."""
    words: tuple[bytes, ...] = ()
    """Parts that mean something in the format."""
    max_seconds = 2.0
    """Longest time for one input."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-fuzz-")
        self.folder = Path(self._folder.name)

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Read an input; errors that users are meant to see are caught. Raises any other exception for a finding."""

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        return mutate_bytes(data, rng, self.words, self.seeds)

    def close(self) -> None:
        """Stop what was started, and delete the files."""
        self._folder.cleanup()


class JSONTarget(Target):
    """A reader of JSON, whose inputs mostly stay JSON."""

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1:
            return super().mutate(data, rng)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = json.loads(rng.choice(self.seeds))
        changed = mutate_json(value, rng, json.loads(rng.choice(self.seeds)))
        return as_json(changed)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
