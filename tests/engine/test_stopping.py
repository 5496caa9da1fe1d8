"""When a sequence ends by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine import stopping
from octavo.errors import InvalidParameter
from octavo.sampling_params import RepetitionDetectionParams, SamplingParams
from octavo.types import Sequence
from tests.engine.making import make_request


def make_sequence(max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(7,))
    return Sequence(make_request(0, prompt=3, max_tokens=max_tokens, params=params, eos_token_ids=(2,)))


@pytest.mark.parametrize(
    ("max_tokens", "position", "tokens", "kept", "reason"),
    [
        (5, 3, [4], [4], None),
        (5, 3, [4, 4, 4, 4], [4, 4, 4, 4], None),
        (5, 7, [4], [4], "length"),
        (5, 3, [4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4], "length"),
        (5, 3, [2], [2], "stop"),
        (5, 3, [4, 7, 4], [4, 7], "stop"),
        (5, 7, [2], [2], "stop"),
        (0, 3, [4], [], "length"),
        (0, 3, [2], [], "length"),
    ],
)
def test_cut(max_tokens: int, position: int, tokens: list[int], kept: list[int], reason: str | None) -> None:
    assert stopping.cut(make_sequence(max_tokens), position, tokens) == (kept, reason)


def test_only_a_stop_token_of_the_client_is_reported() -> None:
    seq = make_sequence(5)
    assert stopping.stop_reason(seq, [4, 7]) == 7
    assert stopping.stop_reason(seq, [4, 2]) is None
    assert stopping.stop_reason(seq, [4, 4]) == "repetition"


@pytest.mark.parametrize(
    ("limits", "tokens", "is_found"),
    [
        ((1, 1, 3), [5, 5], False),
        ((1, 1, 3), [5, 5, 5], True),
        ((1, 1, 3), [5, 5, 6, 5, 5], False),
        ((3, 1, 2), [9, 1, 2, 3, 1, 2, 3], True),
        ((2, 1, 2), [9, 1, 2, 3, 1, 2, 3], False),
        ((3, 3, 2), [4, 4, 4, 4], False),
        ((3, 3, 2), [4, 4, 4, 4, 4, 4], True),
        ((3, 2, 3), [1, 2, 1, 2, 1, 2], True),
        ((3, 2, 3), [1, 2, 1, 2, 1], False),
        ((3, 2, 3), [1, 2, 3, 1, 2, 1, 2], False),
        ((8, 1, 2), [], False),
    ],
)
def test_a_repeated_pattern_is_found(limits: tuple[int, int, int], tokens: list[int], is_found: bool) -> None:
    assert RepetitionDetectionParams(*limits).found_in(tokens) == is_found
    assert RepetitionDetectionParams(*limits).found_in([8, *tokens]) == is_found


@given(st.lists(st.integers(0, 2), max_size=20), st.integers(1, 5), st.integers(1, 5), st.integers(2, 4))
def test_it_is_found_as_by_comparing_slices(tokens: list[int], first: int, second: int, count: int) -> None:
    low, high = sorted((first, second))
    sizes = [size for size in range(low, high + 1) if len(tokens) >= size * count]
    expected = any(tokens[len(tokens) - size * count :] == tokens[len(tokens) - size :] * count for size in sizes)
    assert RepetitionDetectionParams(high, low, count).found_in(tokens) == expected


@pytest.mark.parametrize(
    ("min_tokens", "known", "tokens", "kept", "reason"),
    [
        (0, [4, 5, 4], [5], [5], "stop"),
        (0, [4, 5], [4, 5, 4, 5], [4, 5], "stop"),
        (0, [4, 5, 4], [6], [6], None),
        (0, [], [1, 2], [1, 2], None),
        (5, [4, 5, 4], [5, 4, 5], [5, 4], "stop"),
        (0, [4, 5, 4], [7], [7], "stop"),
    ],
)
def test_a_repetition_of_output_tokens_ends_a_sequence(
    min_tokens: int, known: list[int], tokens: list[int], kept: list[int], reason: str | None
) -> None:
    params = SamplingParams(
        max_tokens=20,
        min_tokens=min_tokens,
        stop_token_ids=(7,),
        repetition_detection=RepetitionDetectionParams(2, 2, 2),
    )
    seq = Sequence(make_request(0, prompt=[1, 2], max_tokens=20, params=params))
    seq.tokens += known
    assert stopping.cut(seq, 2 + len(known), tokens) == (kept, reason)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_pattern_size", (-1,)),
        ("min_pattern_size", (0, 2)),
        ("max_pattern_size", (129,)),
        ("min_pattern_size", (3, 4)),
        ("min_pattern_size", (3, 0)),
        ("min_count", (3, 1, 1)),
        ("min_count", (3, 1, True)),
    ],
)
def test_bad_patterns_are_refused_by_name(name: str, values: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameter, match=name):
        RepetitionDetectionParams(*values)
    with pytest.raises(InvalidParameter, match="repetition_detection"):
        SamplingParams(repetition_detection=3)  # type: ignore[arg-type]
