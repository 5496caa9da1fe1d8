"""What a trial lets through can be run, large forms are served, and what explodes is refused before it can run."""

from __future__ import annotations

import asyncio
import json
import random
import time
from functools import cache
from typing import Any

import pytest

from octavo.grammar import forms, tester
from octavo.grammar.matchers import compile_matcher, fill_mask, new_mask
from octavo.grammar.trial_queue import GrammarRefused, TrialQueue
from octavo.grammar.vocabulary import PackedVocabulary, pack_tokens
from octavo.system.child_worker import REFUSED, RENDERED
from tests.grammar.test_trial_queue import BOMBS
from tests.grammar.walks import EOS, VOCABULARY, allowed, tokenizer, write
from tests.tiers import one_in

CHOICES = [f"word {index}" for index in range(10_000)]


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": ["string", "integer"][i % 2]} for i in range(count)}}


def described(count: int) -> dict[str, Any]:
    """As pydantic writes a class with optional fields."""
    kind = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    return {
        "type": "object",
        "properties": {f"field_{i}": {**kind, "title": f"Field {i}", "default": None} for i in range(count)},
    }


LARGE = {
    "2,000 choices": forms.choice(CHOICES[:2000]),
    "10,000 choices": forms.choice(CHOICES),
    "10,000 choices of 20 characters": forms.choice([f"{index * 7919 % 10_007:020}" for index in range(10_000)]),
    "enum": forms.json_schema({"enum": CHOICES}),
    "800 optional properties": forms.json_schema(optional(800)),
    "2,000 optional properties": forms.json_schema(optional(2000)),
    "2,000 optional properties, open": forms.json_schema({**optional(2000), "additionalProperties": True}),
    "2,000 fields": forms.json_schema(described(2000)),
    "2,000 required properties": forms.json_schema({**optional(2000), "required": list(optional(2000)["properties"])}),
}
EXPLOSIVE = {
    "expression": forms.regex("(a?){500}a{500}"),
    "expression of a grammar": forms.grammar("start: /(a?){500}a{500}/"),
    "rule": forms.grammar('start: ("a"?){500} "a"{500}'),
    "repeats in Lark": forms.grammar('start: "a"{1000000}'),
    "repeats in GBNF": forms.grammar('root ::= "a"{1000000}'),
    "repeats in an expression": forms.regex("a{1000000}"),
    "slow repeats": forms.grammar('start: "a"{10000}'),
    "wide rule": forms.grammar("start: " + " | ".join(f'"word {index}"' for index in range(9000))),
}


@cache
def trial() -> tester.Tester:
    return tester.Tester(VOCABULARY)


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_forms_are_served(name: str) -> None:
    kind, text = trial().serve(forms.grammar_text(LARGE[name]))
    assert kind == RENDERED, text
    made = [write(LARGE[name], random.Random(seed)) for seed in range(3)]
    for each in made:
        assert each is None or name.endswith("choices") <= (each.decode() in CHOICES)


def test_any_of_many_properties_may_be_written() -> None:
    text = json.dumps({f"p{i}": ["text", 12][i % 2] for i in range(0, 2000, 51)})
    matcher = compile_matcher(trial().serve(forms.grammar_text(LARGE["2,000 optional properties"]))[1], tokenizer())
    mask = new_mask(tokenizer())
    for byte in text.encode():
        fill_mask(matcher, mask)
        assert mask[byte // 8] >> byte % 8 & 1, matcher.get_error()
        matcher.consume_token(byte)
    assert matcher.is_accepting()


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLOSIVE)
def test_what_explodes_is_refused_in_bounded_time(name: str) -> None:
    async def check() -> None:
        packed = PackedVocabulary(pack_tokens(VOCABULARY.tokens), VOCABULARY.special_ids, VOCABULARY.eos_ids)
        trials = TrialQueue(lambda: packed)
        try:
            await trials.try_grammar(forms.grammar_text(forms.choice(["yes"])))
            started = time.monotonic()
            with pytest.raises(GrammarRefused, match="cannot be used"):
                await trials.try_grammar(forms.grammar_text(EXPLOSIVE[name]))
            assert time.monotonic() - started < 150, "two seconds of processor time, and what other work takes"
        finally:
            trials.close()

    asyncio.run(check())


@pytest.mark.parametrize("number", [-(2**63), -9223372036854775296, -2e19])
def test_numbers_that_end_the_process_of_llguidance_do_not_reach_it(number: float) -> None:
    """It dies of them with SIGSEGV, and so would pytest."""
    for schema in ({"enum": ["a", number]}, {"type": "integer", "const": number}, {"minimum": number}):
        assert trial().serve(forms.grammar_text(forms.json_schema(schema)))[0] == RENDERED
    form = forms.grammar('start: %json {"const": ' + f"{number:.0f}" + "}")
    assert trial().serve(forms.grammar_text(form))[0] == REFUSED


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOMBS, *LARGE])
def test_what_passes_the_trial_can_be_written(name: str) -> None:
    """Under the limits of the engine, for far longer than the trial writes."""
    text = forms.grammar_text({**BOMBS, **LARGE}[name])
    kind, grammar = trial().serve(text)
    if kind != RENDERED:
        return
    for seed in range(100, 103):
        matcher, mask, rng = compile_matcher(grammar, tokenizer()), new_mask(tokenizer()), random.Random(seed)
        for _ in range(2 * max(tester.WALKS)):
            fill_mask(matcher, mask)
            assert not matcher.is_error(), matcher.get_error()
            token = rng.choice(allowed(mask))
            if token == EOS:
                break
            matcher.consume_token(token)
