"""Regular expressions of JSON numbers within exact bounds of any size, with a bounded number of digits.

A bound is compared digit by digit, from the left, so nothing is rounded. The expressions have only classes of digits,
groups, repeats and alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import NamedTuple

MAX_DIGITS = 20
"""Digits in front of the point where no bound needs more; 2**64 has 20."""
MAX_FRACTION = 17
"""Digits behind the point, unless a bound has more: the most that tell two doubles apart."""
_NATURAL = rf"(0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
_FRACTION = rf"(\.[0-9]{{1,{MAX_FRACTION}}})?"
INTEGER = f"-?{_NATURAL}"
NUMBER = rf"{INTEGER}{_FRACTION}([eE][+-]?[0-9]{{1,2}})?"


class Bound(NamedTuple):
    """One end of a range."""

    value: Decimal
    is_inside: bool
    """Whether the range contains ``value``."""


def integer_range(low: int | None, high: int | None) -> str | None:
    """Whole numbers from ``low`` to ``high``, both included; ``None`` if there are none."""
    if low is not None and high is not None and low > high:
        return None
    found = []
    if low is None or low < 0:
        most = None if low is None else -low
        if inner := _naturals(1 if high is None or high >= 0 else -high, most):
            found.append(f"-({inner})")
    if high is None or high >= 0:
        found.append(_naturals(max(low or 0, 0), high))
    return "|".join(each for each in found if each) or None


def number_range(low: Bound | None, high: Bound | None) -> tuple[str, ...] | None:
    """Expressions of which a number in the range matches every one; ``None`` if no number is in the range."""
    if (
        low
        and high
        and (low.value > high.value or (low.value == high.value and not (low.is_inside and high.is_inside)))
    ):
        return None
    if low is None and high is None:
        return (NUMBER,)
    digits = max(MAX_DIGITS, *(1 + len(_parts(bound.value.copy_abs())[0]) for bound in (low, high) if bound))
    return (*([_at_least(low, digits)] if low else []), *([_at_most(high, digits)] if high else []))


def _at_least(low: Bound, digits: int) -> str:
    value, is_inside = low
    if value > 0 or (value == 0 and not is_inside):
        return _magnitude_above(value, is_inside, digits)
    above = f"({_naturals(0, None, digits)}){_FRACTION}"
    return above if value == 0 else f"{above}|-({_magnitude_below(value.copy_abs(), is_inside)})"


def _at_most(high: Bound, digits: int) -> str:
    value, is_inside = high
    if value < 0 or (value == 0 and not is_inside):
        return f"-({_magnitude_above(value.copy_abs(), is_inside, digits)})"
    return f"-({_naturals(0, None, digits)}){_FRACTION}|{_magnitude_below(value, is_inside)}"


def _magnitude_above(value: Decimal, is_inside: bool, digits: int) -> str:
    """Numbers without a sign from ``value`` on, with up to ``digits`` digits in front of the point."""
    whole, fraction = _parts(value)
    more = _naturals(int(whole) + 1, None, digits)
    return f"{whole}({_fraction_above(fraction, is_inside)})|({more}){_FRACTION}"


def _magnitude_below(value: Decimal, is_inside: bool) -> str:
    """Numbers without a sign up to ``value``."""
    whole, fraction = _parts(value)
    found = [f"({_naturals(0, int(whole) - 1)}){_FRACTION}"] if int(whole) > 0 else []
    if fraction or is_inside:
        found.append(f"{whole}({_fraction_below(fraction, is_inside)})?")
    return "|".join(found)


def _parts(value: Decimal) -> tuple[str, str]:
    """Digits in front of the point and behind it, without zeros at the end."""
    whole, _, fraction = f"{value:f}".partition(".")
    return whole, fraction.rstrip("0")


def _fraction_above(digits: str, is_inside: bool) -> str:
    """A point and digits that are more than ``digits``, or as many; perhaps nothing."""
    longest = max(MAX_FRACTION, len(digits) + 1)
    if not digits and is_inside:
        return _FRACTION
    above = [
        rf"\.{digits[:place]}[{int(digit) + 1}-9][0-9]{{0,{longest - place - 1}}}"
        for place, digit in enumerate(digits)
        if digit != "9"
    ]
    rest = longest - len(digits)
    if is_inside:
        return "|".join([*above, rf"\.{digits}[0-9]{{0,{rest}}}"])
    return "|".join([*above, rf"\.{digits}0{{0,{rest - 1}}}[1-9][0-9]{{0,{rest - 1}}}"])


def _fraction_below(digits: str, is_inside: bool) -> str:
    """A point and digits that are less than ``digits``, or as many; nothing at all is not among them."""
    longest = max(MAX_FRACTION, len(digits) + 1)
    below = []
    for place, digit in enumerate(digits):
        if place:
            below.append(rf"\.{digits[:place]}")
        if digit != "0":
            below.append(rf"\.{digits[:place]}[0-{int(digit) - 1}][0-9]{{0,{longest - place - 1}}}")
    if is_inside:
        below.append(rf"\.{digits}0{{{0 if digits else 1},{longest - len(digits)}}}")
    return "|".join(below)


def _naturals(low: int, high: int | None, digits: int = MAX_DIGITS) -> str:
    """Whole numbers without a sign from ``low`` to ``high``; without ``high``, up to ``digits`` digits or more."""
    if high is None:
        high = 10 ** max(digits, len(str(low)) + 1) - 1
    if low > high:
        return ""
    found: list[str] = []
    lengths = range(len(str(low)), len(str(high)) + 1)
    full = [length for length in lengths if length > 1 and low <= 10 ** (length - 1) and 10**length - 1 <= high]
    for length in lengths:
        if length not in full:
            least, most = 10 ** (length - 1) if length > 1 else 0, 10**length - 1
            found += _same_length(str(max(low, least)), str(min(high, most)))
    if full:
        found.append(f"[1-9][0-9]{{{full[0] - 1},{full[-1] - 1}}}")
    return "|".join(found)


def _same_length(low: str, high: str) -> Iterator[str]:
    """Expressions of the numbers from ``low`` to ``high``, which have as many digits."""
    same = next((place for place, (a, b) in enumerate(zip(low, high, strict=True)) if a != b), len(low))
    if same == len(low):
        yield low
        return
    rest = len(low) - same - 1
    # The first digit that differs, from the lowest that leaves all later digits free to the highest that does.
    first = int(low[same]) + (low[same + 1 :] != "0" * rest)
    last = int(high[same]) - (high[same + 1 :] != "9" * rest)
    if first <= last:
        yield f"{low[:same]}[{first}-{last}]{_any_digits(rest)}"
    if first > int(low[same]):
        for place in range(same + 1, len(low)):
            is_last = place == len(low) - 1
            least = int(low[place]) + (not is_last)
            if least <= 9:
                yield f"{low[:place]}[{least}-9]{_any_digits(len(low) - place - 1)}"
    if last < int(high[same]):
        for place in range(same + 1, len(high)):
            is_last = place == len(high) - 1
            most = int(high[place]) - (not is_last)
            if most >= 0:
                yield f"{high[:place]}[0-{most}]{_any_digits(len(high) - place - 1)}"


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""
