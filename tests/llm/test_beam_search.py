"""Beam search: equal to that of transformers, and to a plain search over the logits of transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM, BeamSearchParams, BeamSearchSequence, InvalidParameter, RequestError, RequestFailed
from octavo import SamplingParams as Params
from tests.models.families import ROWS, VOCAB_SIZE, make_checkpoint

ROW = next(row for row, (kind, _) in ROWS.items() if kind == "llama")
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_kv_blocks": 256}
PROMPTS = [random.Random(seed).choices(range(3, VOCAB_SIZE), k=length) for seed, length in enumerate((9, 1, 17))]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("beams")
    model = make_checkpoint(folder, ROW)
    model.folder = folder
    return model


@pytest.fixture(scope="module")
def made(reference: PreTrainedModel) -> Iterator[LLM]:
    with LLM(reference.folder, **SETTINGS) as llm:
        yield llm


@torch.inference_mode()
def plain_search(model: PreTrainedModel, prompt: list[int], params: BeamSearchParams, eos: int) -> list[Any]:
    """The same search over all tokens, without an engine: pairs of tokens and log-probability, best first."""

    def score(found: tuple[list[int], float]) -> float:
        tokens, logprob = found
        length = len(tokens) - (tokens[-1] == eos and not params.ignore_eos)
        return -logprob / length**params.length_penalty

    beams, ended = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        grown = []
        for tokens, total in beams:
            logprobs = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
            for value, token in zip(*(part.tolist() for part in logprobs.topk(2 * params.beam_width)), strict=True):
                is_end = token == eos and not params.ignore_eos
                (ended if is_end else grown).append(([*tokens, token], total + value))
        beams = sorted(grown, key=score)[: params.beam_width]
    return sorted(ended + beams, key=score)[: params.beam_width]


def check_equal(found: list[BeamSearchSequence], expected: list[Any]) -> None:
    assert [sequence.tokens for sequence in found] == [tokens for tokens, _ in expected]
    assert [sequence.cum_logprob for sequence in found] == pytest.approx([logprob for _, logprob in expected], abs=1e-4)


@pytest.mark.parametrize("width", [1, 4, 10])
def test_it_finds_what_transformers_finds(made: LLM, reference: PreTrainedModel, width: int) -> None:
    outputs = made.beam_search(PROMPTS, BeamSearchParams(width, 12, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [sequence.tokens for sequence in output.sequences] == expected.tolist()
        assert all(sequence.finish_reason == "length" for sequence in output.sequences)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -1.0])
def test_ends_and_lengths_count_as_in_a_plain_search(
    made: LLM, reference: PreTrainedModel, length_penalty: float
) -> None:
    params = BeamSearchParams(3, 8, length_penalty=length_penalty)
    eos = made.info.eos_token_ids[0]
    outputs = made.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_equal(output.sequences, plain_search(reference, prompt, params, eos))


def test_a_likely_end_ends_a_sequence(made: LLM, reference: PreTrainedModel) -> None:
    """With the greedy choice behind the prompt as the end of text, one sequence is that token alone."""
    greedy = made.generate([PROMPTS[0]], Params(temperature=0, max_tokens=1))[0].outputs[0].token_ids[0]
    params = BeamSearchParams(3, 4, length_penalty=0.0)
    before = made.info
    made.info = msgspec.structs.replace(before, eos_token_ids=(greedy,))
    try:
        (output,) = made.beam_search([PROMPTS[0]], params)
    finally:
        made.info = before
    check_equal(output.sequences, plain_search(reference, PROMPTS[0], params, greedy))
    first = output.sequences[0]
    assert (first.tokens, first.finish_reason, first.stop_reason) == ([*PROMPTS[0], greedy], "stop", greedy)


def test_beams_share_the_blocks_of_the_prefix_cache(made: LLM) -> None:
    prompt = random.Random(7).choices(range(3, VOCAB_SIZE), k=200)
    before = made.engine.stats()
    made.beam_search(prompt, BeamSearchParams(4, 10, ignore_eos=True))
    stats = made.engine.stats()
    num_requests = 1 + 9 * 4
    assert stats.num_output_tokens - before.num_output_tokens == num_requests
    most_of_a_request = SETTINGS["block_size"] + 1
    assert stats.num_prompt_tokens - before.num_prompt_tokens <= 200 + num_requests * most_of_a_request
    made.engine.check()
    assert stats.num_used_blocks == 0


def test_texts_have_the_prompt_and_choices_their_logprobs(llm: LLM) -> None:
    (output,) = llm.beam_search("Hello", BeamSearchParams(2, 3))
    for sequence in output.sequences:
        assert sequence.text is not None
        assert sequence.text.startswith("Hello")
        chosen = zip(sequence.tokens[5:], sequence.logprobs, strict=True)
        assert sequence.cum_logprob == pytest.approx(sum(entry[token].logprob for token, entry in chosen))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 11}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.0}, "max_tokens"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
    ],
)
def test_bad_parameters_are_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidParameter, match=named) as found:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4} | values)
    assert found.value.param == named


def test_what_does_not_fit_is_refused_and_a_failure_ends_the_search(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameter, match="must be BeamSearchParams, not SamplingParams"):
        llm.beam_search("a", Params())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="context length"):
        llm.beam_search("a" * 250, BeamSearchParams(2, 10))

    def fail(*_: Any) -> Any:
        raise RequestFailed("broken")

    monkeypatch.setattr(llm.engine, "add", fail)
    with pytest.raises(RequestFailed, match="broken"):
        llm.beam_search("a", BeamSearchParams(2, 10))
