"""The pieces of ``LLM.stream`` add up to the output of ``generate``; ``LLM.chat`` renders the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, InvalidParameter, SamplingParams
from tests.llm.tiny import SETTINGS, write_checkpoint

HI = [{"role": "user", "content": "Hi"}]


def test_pieces_concatenate_to_the_whole(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=12, logprobs=1, stop=("\x00",))
    (result,) = llm.generate("Hello", params)
    pieces = list(llm.stream("Hello", params))
    for expected in result.outputs:
        own = [piece for piece in pieces if piece.index == expected.index]
        assert "".join(piece.text for piece in own) == expected.text
        assert [token for piece in own for token in piece.token_ids] == expected.token_ids
        assert [entry for piece in own for entry in piece.logprobs or []] == expected.logprobs
        assert own[-1].finish_reason == expected.finish_reason
        assert own[-1].cumulative_logprob == expected.cumulative_logprob
        assert all(piece.finish_reason is None for piece in own[:-1])
        assert len(own) > 1


def test_leaving_a_stream_aborts_the_rest(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=100, ignore_eos=True, n=2))
    next(stream)
    assert llm.engine.stats().num_running == 2
    stream.close()
    assert llm.engine.stats().num_running == 0


def test_a_stream_and_a_call_in_between_do_not_disturb_each_other(llm: LLM) -> None:
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    alone = llm.generate("Hello", params)[0].outputs[0]
    stream = llm.stream("Hello", params)
    pieces = [next(stream)]
    between = llm.generate("Hello", params)[0].outputs[0]
    pieces += stream
    assert between.token_ids == alone.token_ids
    assert [token for piece in pieces for token in piece.token_ids] == alone.token_ids


def test_a_bad_prompt_is_refused_when_the_stream_is_made(llm: LLM) -> None:
    with pytest.raises(InvalidParameter):
        llm.stream("")
    with pytest.raises(InvalidParameter, match="'sampling_params' must be"):
        llm.stream("a", {})  # type: ignore[arg-type]


def test_chat_renders_the_template(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4)
    messages = [{"role": "user", "content": "Hi"}]
    (result,) = llm.chat(messages, greedy)
    assert llm.get_tokenizer().decode(result.prompt_token_ids) == "user: Hi\nassistant:"
    assert result.outputs[0].token_ids == llm.generate("user: Hi\nassistant:", greedy)[0].outputs[0].token_ids
    several = llm.chat([messages, [*messages, {"role": "assistant", "content": "Yes"}]], greedy)
    assert [len(other.prompt_token_ids) for other in several] == [19, 34]
    with pytest.raises(InvalidParameter, match="messages"):
        llm.chat([], greedy)
    begun = [*messages, {"role": "assistant", "content": "Yes, \n"}]
    (result,) = llm.chat(begun, greedy, add_generation_prompt=False, continue_final_message=True)
    assert llm.get_tokenizer().decode(result.prompt_token_ids) == "user: Hi\nassistant: Yes, \n"


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [
        (HI[0], {}, "messages"),
        ("Hi", {}, "messages"),
        (7, {}, "messages"),
        (HI, {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        (HI, {"tools": [5]}, "tools"),
        (HI, {"tools": {"type": "function"}}, "tools"),
        (HI, {"sampling_params": {}}, "sampling_params"),
    ],
)
def test_a_bad_conversation_is_refused_by_name(llm: LLM, messages: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        llm.chat(messages, **options)
    assert refused.value.param == named


def test_a_template_of_ones_own_replaces_the_models(tiny_checkpoint: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ mood }}{{ messages[-1].content }}", "utf-8-sig")  # as editors may write it
    with LLM(tiny_checkpoint, chat_template=str(template), **SETTINGS) as llm:
        tokens = llm.render_chat([{"role": "user", "content": "Hi"}], {"mood": "!"})
        assert llm.get_tokenizer().decode(tokens) == "!Hi"


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    with LLM(folder, **SETTINGS) as llm, pytest.raises(InvalidParameter, match="template"):
        llm.chat([{"role": "user", "content": "Hi"}])


@pytest.mark.model
def test_the_default_model_knows_its_sums(default_model_path: Path) -> None:
    with LLM(default_model_path, num_kv_blocks=32) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        (output,) = llm.chat([{"role": "user", "content": "What is 2+2?"}], params)[0].outputs
        assert "4" in output.text
        assert output.finish_reason == "stop"
