"""How many tokens a request may generate."""

from __future__ import annotations

import pytest

from octavo.errors import ContextLengthExceeded, InvalidParameter
from octavo.sampling_params import SamplingParams, resolve_max_tokens


@pytest.mark.parametrize(
    ("asked", "prompt", "expected"), [(16, 10, 16), (90, 10, 90), (None, 10, 90), (0, 100, 0), (None, 99, 1)]
)
def test_what_fits_is_granted(asked: int | None, prompt: int, expected: int) -> None:
    assert resolve_max_tokens(SamplingParams(max_tokens=asked), prompt, max_model_len=100) == expected


@pytest.mark.parametrize(("asked", "prompt"), [(91, 10), (1, 100), (None, 100), (None, 101), (0, 101)])
def test_what_does_not_fit_is_refused_with_both_lengths(asked: int | None, prompt: int) -> None:
    with pytest.raises(ContextLengthExceeded, match=r"^This model's maximum context length is 100 tokens") as refused:
        resolve_max_tokens(SamplingParams(max_tokens=asked), prompt, max_model_len=100, field="messages")
    assert refused.value.param == "messages"
    assert str(prompt) in refused.value.message
    assert asked is None or str(asked) in refused.value.message


def test_a_default_bounds_what_is_left_and_is_never_refused() -> None:
    assert resolve_max_tokens(SamplingParams(max_tokens=None), 10, max_model_len=100, default=16) == 16
    assert resolve_max_tokens(SamplingParams(max_tokens=None), 95, max_model_len=100, default=16) == 5
    assert resolve_max_tokens(SamplingParams(max_tokens=20), 10, max_model_len=100, default=16) == 20


def test_min_tokens_that_the_context_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidParameter) as refused:
        resolve_max_tokens(SamplingParams(max_tokens=None, min_tokens=6), 95, max_model_len=100)
    assert refused.value.param == "min_tokens"
