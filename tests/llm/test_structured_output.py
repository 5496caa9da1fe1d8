"""``SamplingParams.grammar`` in this process: over a model of random weights, with and without others in the batch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo import LLM, Engine, InvalidParameter, SamplingParams
from octavo.grammar import forms
from tests.llm.tiny import SETTINGS

EXPRESSION = "[a-c]{3}[0-9]{1,4}"


def params(seed: int, **more: object) -> SamplingParams:
    grammar = forms.grammar_text(forms.regex(EXPRESSION))
    return SamplingParams(grammar=grammar, seed=seed, max_tokens=20, **more)  # type: ignore[arg-type]


def test_a_constrained_text_matches_alone_and_in_a_batch(llm: LLM) -> None:
    bound = [params(seed, n=2, logprobs=1) for seed in range(4)]
    free = [SamplingParams(seed=seed, max_tokens=12, ignore_eos=True) for seed in range(4)]
    together = llm.generate(["x"] * 8, [*bound, *free])
    for result in together[:4]:
        for output in result.outputs:
            assert output.finish_reason == "stop"
            assert re.fullmatch(EXPRESSION, output.text)
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids)
    alone = [llm.generate("x", each)[0] for each in (*bound, *free)]
    assert [[o.text for o in r.outputs] for r in alone] == [[o.text for o in r.outputs] for r in together]


def test_min_tokens_gives_way_to_the_end_of_the_grammar(llm: LLM) -> None:
    (output,) = llm.generate("x", params(1, min_tokens=15))[0].outputs
    assert output.finish_reason == "stop"
    assert re.fullmatch("[a-c]{3}[0-9]{4}", output.text)


def test_a_text_that_goes_on_behind_its_end_is_bound_no_more(llm: LLM) -> None:
    (output,) = llm.generate("x", params(1, ignore_eos=True))[0].outputs
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 20
    assert re.match(EXPRESSION, output.text)


def test_a_stop_string_ends_a_bound_text(llm: LLM) -> None:
    grammar = forms.grammar_text(forms.choice(["one, two, three"]))
    (output,) = llm.generate("x", SamplingParams(grammar=grammar, stop=(", th",), max_tokens=30))[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("one, two", "stop", ", th")


BAD = [
    ("", "is not a grammar made by octavo.grammar.forms"),
    ('root ::= "yes"', "is not a grammar made by octavo.grammar.forms"),
    (forms.grammar_text(forms.grammar("root ::= (((")), "is not a grammar"),
    (forms.grammar_text(forms.json_schema({"type": "object", "not": {}})), "uses 'not'"),
]


@pytest.mark.parametrize(("grammar", "reason"), BAD)
def test_a_text_that_is_no_grammar_is_refused_before_anything_runs(llm: LLM, grammar: str, reason: str) -> None:
    steps, params = llm.engine.stats().num_steps, SamplingParams(grammar=grammar)
    for call in (lambda: llm.generate(["x", "x"], [SamplingParams(), params]), lambda: llm.stream("x", params)):
        with pytest.raises(InvalidParameter, match=f"^'grammar' {reason}") as refused:
            call()
        assert refused.value.param == "grammar"
    assert llm.engine.stats().num_steps == steps


def test_an_engine_refuses_a_text_that_is_no_grammar(tiny_checkpoint: Path) -> None:
    with Engine(tiny_checkpoint, **SETTINGS) as engine:
        with pytest.raises(InvalidParameter, match=r"octavo\.grammar\.forms"):
            engine.add("x", SamplingParams(grammar="root"))
        assert not engine.has_work
