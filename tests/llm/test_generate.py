"""``LLM.generate``: prompts in every form, results in vLLM's shape."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from octavo import (
    LLM,
    ConfigError,
    ContextLengthExceeded,
    InvalidParameter,
    RepetitionDetectionParams,
    RequestError,
    SamplingParams,
    Unavailable,
)
from octavo.engine.engine import Engine
from tests.llm.tiny import MAX_MODEL_LEN, SETTINGS, write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def a_token(llm: LLM) -> int:
    return llm.get_tokenizer().encode("a")[0]


def says_a(llm: LLM, **changes: Any) -> SamplingParams:
    """Parameters under which the model generates only the letter a."""
    return SamplingParams(temperature=0, logit_bias={a_token(llm): 100}, **changes)


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    forms: list[Any] = ["Hello", ids, tuple(ids), {"prompt": "Hello"}, {"prompt_token_ids": ids}, ["Hello"], [ids]]
    results = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert all(result[0].prompt_token_ids == ids for result in results)
    assert len({tuple(result[0].outputs[0].token_ids) for result in results}) == 1
    assert [result[0].prompt for result in results] == ["Hello", None, None, "Hello", None, "Hello", None]


def test_results_have_the_shape_and_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", [5, 6, 7], {"prompt": "three"}]
    params = [SamplingParams(temperature=0, max_tokens=limit) for limit in (9, 2, 5)]
    results = llm.generate(prompts, params)
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 2, 5]
    assert [len(result.prompt_token_ids) for result in results] == [3, 3, 5]
    assert all(result.finished and result.prompt_logprobs is None for result in results)
    assert len({result.request_id for result in results}) == 3
    for result in results:
        (output,) = result.outputs
        assert (output.index, output.finish_reason, output.stop_reason, output.error) == (0, "length", None, None)
        assert output.logprobs is None
        assert output.cumulative_logprob is None
        assert output.text == llm.get_tokenizer().decode(output.token_ids)
    assert llm.generate([], GREEDY) == []


def test_together_gives_what_each_gives_alone(llm: LLM) -> None:
    prompts = ["a", "bc" * 60, "def", "Hello, world"]
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(4)]
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


def test_choices_of_a_seed_differ_and_come_again(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=7, max_tokens=10)
    first, second = (llm.generate("Hello", params)[0].outputs for _ in range(2))
    assert [output.index for output in first] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in first}) == 4
    assert [output.token_ids for output in first] == [output.token_ids for output in second]


def test_without_a_seed_the_setting_decides(tiny_checkpoint: Path) -> None:
    def texts(**settings: Any) -> list[list[int]]:
        with LLM(tiny_checkpoint, **SETTINGS, **settings) as llm:
            return [llm.generate("Hello", SamplingParams(max_tokens=10))[0].outputs[0].token_ids for _ in range(2)]

    assert texts() == texts()
    assert texts()[0] != texts()[1]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (result,) = llm.generate("x", says_a(llm, max_tokens=20, stop=("aaa",), n=2))
    for output in result.outputs:
        assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "aaa")
        assert output.token_ids == [a_token(llm)] * 3
    (result,) = llm.generate("x", says_a(llm, stop=("aaa",), include_stop_str_in_output=True, min_tokens=5))
    assert result.outputs[0].text == "aaaaaa"


def test_a_text_that_repeats_itself_ends(llm: LLM) -> None:
    pattern = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    for further in ({}, {"stop": ("b",)}):
        params = says_a(llm, max_tokens=20, n=2, repetition_detection=pattern, **further)
        (result,) = llm.generate("aaaa", params)
        for output in result.outputs:
            assert (output.text, output.finish_reason, output.stop_reason) == ("aaa", "stop", "repetition")
    (result,) = llm.generate("x", says_a(llm, max_tokens=20, min_tokens=6, repetition_detection=pattern))
    assert result.outputs[0].text == "aaaaaa"
    (result,) = llm.generate("x", says_a(llm, max_tokens=2, repetition_detection=pattern))
    assert result.outputs[0].finish_reason == "length"


def test_a_stop_token_is_named_and_end_of_text_is_not(llm: LLM) -> None:
    a, end = a_token(llm), 256
    (output,) = llm.generate("x", says_a(llm, stop_token_ids=(a,)))[0].outputs
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([a], "", "stop", a)
    ends = SamplingParams(temperature=0, logit_bias={end: 100}, max_tokens=4)
    (output,) = llm.generate("x", ends)[0].outputs
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([end], "", "stop", None)
    ignores = SamplingParams(temperature=0, logit_bias={end: 100}, max_tokens=4, ignore_eos=True)
    (output,) = llm.generate("x", ignores)[0].outputs
    assert (len(output.token_ids), output.finish_reason) == (4, "length")


def test_logprobs_have_the_sampled_token_and_the_best_ones(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1)
    (result,) = llm.generate("Hello", params)
    (output,) = result.outputs
    assert output.logprobs is not None
    assert output.cumulative_logprob is not None
    assert len(output.logprobs) == 6
    for token, found in zip(output.token_ids, output.logprobs, strict=True):
        assert next(iter(found)) == token
        assert 2 <= len(found) <= 3
        best = sorted(found.values(), key=lambda entry: entry.rank)
        assert [entry.rank for entry in best[:2]] == [1, 2]
        assert best[0].logprob >= best[1].logprob
        assert found[token].decoded_token == llm.get_tokenizer().token_text(token)
    total = sum(found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True))
    assert math.isclose(output.cumulative_logprob, total)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for token, entry in zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert entry[token].logprob < 0


def test_a_prompt_seen_before_is_found_in_the_cache(llm: LLM) -> None:
    prompt = "once upon a time there was a prefix " * 2
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens >= 64


def test_progress_is_shown_when_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr() == ("", "")
    llm.generate(["a", "b"], GREEDY, use_progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "100%" in shown.err


@pytest.mark.parametrize(
    ("prompts", "params", "named"),
    [
        ("", GREEDY, "prompt"),
        ([["x"]], GREEDY, "prompt"),
        (["fine", []], GREEDY, "prompts[1]"),
        (["fine", [1, 264]], GREEDY, "prompts[1]"),
        (["fine", [1, -1]], GREEDY, "prompts[1]"),
        (["fine", [True]], GREEDY, "prompts[1]"),
        (["fine", {"promt": "x"}], GREEDY, "prompts[1]"),
        (["fine", {"prompt": "x", "prompt_token_ids": [1]}], GREEDY, "prompts[1]"),
        ([[10**5000]], GREEDY, "prompt"),
        (["fine", None], GREEDY, "prompts[1]"),
        (7, GREEDY, "prompts"),
        (b"fine", GREEDY, "prompts"),
        (["fine", bytearray(b"fine")], GREEDY, "prompts[1]"),
        ("a", 7, "sampling_params"),
        (["a", "b"], [GREEDY], "sampling_params"),
        ("a", {"temperature": 0}, "sampling_params"),
        ("a", SamplingParams(stop_token_ids=(264,)), "stop_token_ids"),
        ("a", SamplingParams(logit_bias={264: 1.0}), "logit_bias"),
        (["a", "b" * MAX_MODEL_LEN], GREEDY, "prompts[1]"),
    ],
)
def test_a_bad_request_is_named_before_anything_runs(llm: LLM, prompts: Any, params: Any, named: str) -> None:
    steps = llm.engine.stats().num_steps
    with pytest.raises(RequestError) as refused:
        llm.generate(prompts, params)
    assert refused.value.param == named
    assert llm.engine.stats().num_steps == steps


def test_what_exceeds_the_context_is_refused_and_what_is_left_is_used(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded):
        llm.generate("a" * 200, SamplingParams(max_tokens=57))
    (output,) = llm.generate("a" * 200, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs
    assert len(output.token_ids) == 56


def test_a_model_without_tokenizer_takes_and_gives_token_ids(tmp_path: Path) -> None:
    with LLM(write_checkpoint(tmp_path, with_tokenizer=False), **SETTINGS) as llm:
        (output,) = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, logprobs=0))[0].outputs
        assert (len(output.token_ids), output.text) == (4, "")
        assert output.logprobs is not None
        assert output.logprobs[0][output.token_ids[0]].decoded_token is None
        for prompt, params in (("text", GREEDY), ([1, 2], SamplingParams(stop=("a",)))):
            with pytest.raises(InvalidParameter, match="no tokenizer"):
                llm.generate(prompt, params)
        with pytest.raises(Unavailable):
            llm.get_tokenizer()


def test_settings_are_checked_by_name(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="max_sequences"):
        LLM(tiny_checkpoint, max_sequences=3)
    with pytest.raises(ConfigError, match=r"template\.jinja"):
        LLM(tiny_checkpoint, chat_template="template.jinja")


def test_after_close_nothing_runs(tiny_checkpoint: Path) -> None:
    llm = LLM(tiny_checkpoint, **SETTINGS)
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(Unavailable, match="closed"):
        llm.generate("Hello", GREEDY)
    with pytest.raises(Unavailable, match="closed"):
        list(stream)


def test_closing_closes_the_engine_once(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[Engine]()
    monkeypatch.setattr(Engine, "close", lambda self: closed.append(self))
    with LLM(tiny_checkpoint, **SETTINGS) as llm:
        engine = llm.engine
    llm.close()
    assert closed == [engine]


def test_what_can_be_woken_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="'tags' must be of weights, kv_cache, not 'graphs'"):
        llm.wake_up(tags=["weights", "graphs"])  # type: ignore[list-item]
    llm.wake_up(tags=["weights"])  # which is awake
