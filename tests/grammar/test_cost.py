"""What a mask costs at the size of a real vocabulary."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from octavo.grammar import forms
from octavo.grammar.matchers import compile_matcher, fill_mask, make_tokenizer, new_mask, normalised
from octavo.text.tokenizer import load_tokenizer
from tests.grammar.schemas import SCHEMAS
from tests.grammar.walks import allowed
from tests.timing import undisturbed

MAX_SECONDS = 100e-6


@pytest.mark.timing
@pytest.mark.model
def test_a_mask_costs_less_than_a_tenth_of_a_millisecond(default_model_path: Path) -> None:
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer is not None
    matchers = make_tokenizer(tokenizer.vocabulary(()))
    seconds = undisturbed(lambda: _seconds_of_a_mask(matchers, tokenizer.eos_token_ids), MAX_SECONDS)
    assert seconds < MAX_SECONDS, f"{seconds * 1e6:.0f} microseconds"


def _seconds_of_a_mask(matchers: LLTokenizer, eos_token_ids: Collection[int]) -> float:
    rng = random.Random(0)
    mask = new_mask(matchers)
    seconds, count = 0.0, 0
    for schema in SCHEMAS[::8]:
        matcher = compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), matchers)
        for _ in range(60):
            started = time.thread_time()
            fill_mask(matcher, mask)
            seconds += time.thread_time() - started
            count += 1
            token = rng.choice(allowed(mask))
            if token in eos_token_ids:
                break
            started = time.thread_time()
            matcher.consume_token(token)
            seconds += time.thread_time() - started
    assert count > 500
    return seconds / count
