"""Random changes of inputs: of bytes, and of JSON documents, which stay documents."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

MAX_BYTES = 32 << 10
NUMBERS = [0, 1, 2, 7, 31, 32, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    *(None, True, False, "", "a", "\x00", "\ud800", "é€😀", "x" * 300, [], {}, [[]], [None], {"": None}, float("nan")),
    *(-1, 0, 1, 2, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**30, "1", "true", "-1", "1e9"),
]
TEXTS = ("", "\n", "0", *'\\"{[*%/?&=:,-+', "(?", "{1,9}", "%00", "..")


def mutate_bytes(data: bytes, rng: random.Random, words: Sequence[bytes], seeds: Sequence[bytes]) -> bytes:
    """``data`` with one to four changes; ``words`` are inserted, parts of ``seeds`` replace parts."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(data) + 1)
        end = min(len(data), place + rng.choice((1, 1, 2, 4, 8, 64)))
        kind = rng.randrange(8)
        if kind == 0 and data:
            place = min(place, len(data) - 1)
            data = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
        elif kind == 1:
            data = data[:place] + rng.randbytes(end - place) + data[end:]
        elif kind == 2:
            data = data[:place] + data[end:]
        elif kind == 3:
            data = data[:place] + data[place:end] * rng.choice((2, 3, 50)) + data[end:]
        elif kind == 4:
            number = rng.choice(NUMBERS).to_bytes(8, "little")[: rng.choice((1, 2, 4, 8))]
            data = data[:place] + number + data[place + len(number) :]
        elif kind == 5 and words:
            data = data[:place] + rng.choice(words) + data[rng.choice((place, end)) :]
        elif kind == 6:
            other = rng.choice(seeds)
            data = data[:place] + other[rng.randrange(len(other) + 1) :]
        else:
            data = data[:place]
    return data[:MAX_BYTES]


def mutate_json(value: Any, rng: random.Random, seed: Any) -> Any:
    """``value`` with one to three members or elements changed, added or deleted; some come from ``seed``."""
    value = _copy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = _places(value, [])
        if not places:
            return rng.choice((seed, *VALUES))
        holder, key = rng.choice(places)
        kind = rng.randrange(7)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = _copy(rng.choice(VALUES))
        elif kind == 2:
            other, other_key = rng.choice(places)
            holder[key] = _copy(other[other_key])
        elif kind == 3 and (inner := _places(seed, [])):
            other, other_key = rng.choice(inner)
            _add(holder, other_key, _copy(other[other_key]), rng)
        elif kind == 4:
            _add(holder, rng.choice(("", "type", "$ref", "x" * 100)), _copy(rng.choice(VALUES)), rng)
        elif isinstance(holder[key], str):
            holder[key] = _mutate_text(holder[key], rng)
        elif type(holder[key]) in (int, float):
            holder[key] = rng.choice((holder[key] + 1, -holder[key], holder[key] / 2, rng.choice(NUMBERS)))
        else:
            holder[key] = [_copy(holder[key]) for _ in range(rng.choice((1, 2, 40)))]
    return value


def _mutate_text(text: str, rng: random.Random) -> str:
    place = rng.randrange(len(text) + 1)
    end = min(len(text), place + rng.choice((0, 1, 5)))
    middle = rng.choice((text[place:end] * 20, chr(rng.randrange(0xD7FF)), rng.choice(TEXTS), rng.choice(TEXTS)))
    return text[:place] + middle + text[end:]


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _add(holder: Any, key: Any, value: Any, rng: random.Random) -> None:
    if isinstance(holder, dict):
        holder[str(key)] = value
    else:
        holder.insert(rng.randrange(len(holder) + 1), value)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every member and element, as the object or array that holds it and its key or index."""
    keys: Any = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        _places(value[key], found)
    return found
