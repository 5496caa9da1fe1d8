"""When a sequence ends by itself."""

from __future__ import annotations

import pytest

from octavo.engine import stopping
from octavo.sampling_params import SamplingParams
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
    assert stopping.stop_token_id(seq, [4, 7]) == 7
    assert stopping.stop_token_id(seq, [4, 2]) is None
