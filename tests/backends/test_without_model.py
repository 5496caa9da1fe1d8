"""The engines without a model."""

from __future__ import annotations

import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidParameter
from octavo.llm.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.types import Request, Sequence
from octavo_fleet.backends import instant, toy
from octavo_fleet.backends.toy_models import WORDS, NextByHash
from octavo_fleet.backends.vocabulary import prompt_text, word_tokenizer
from tests.engine.making import make_request


def test_the_vocabulary() -> None:
    tokenizer = word_tokenizer()
    text = "Grüße, <|im_start|> batch cache"
    tokens = tokenizer.encode(text)
    assert prompt_text(tokens) == text
    assert max(tokens) < 259, "words are said, not read"
    ids = [259 + index for index in range(len(WORDS))]
    assert tokenizer.decode(ids) == "".join(f" {word}" for word in WORDS)


def test_the_toy_says_what_the_public_toy_decoder_says() -> None:
    text = "why pages"
    tokens = word_tokenizer().encode(text)
    engine, _ = toy.build(EngineConfig.from_flat({"backend": "toy"}))
    engine.add(Request(0, tokens, SamplingParams(), max_tokens=20))
    said: list[int] = []
    while engine.has_work:
        said += [token for output in engine.step() for token in output.tokens]
        engine.check()
    reference = Sequence(make_request(0, prompt=list(range(1, 1 + len(tokens))), max_tokens=20))
    decoder = NextByHash({0: text})
    for token in said:
        assert token - 259 == decoder(reference, len(reference.tokens))
        reference.tokens.append(token - 259)
    assert len(said) == 20


@pytest.mark.parametrize("backend", [toy, instant])
def test_what_needs_a_model_is_refused(backend: object) -> None:
    engine, _ = backend.build(EngineConfig())  # type: ignore[attr-defined]
    for params in (SamplingParams(prompt_logprobs=1), SamplingParams(grammar="start: /a/")):
        with pytest.raises(InvalidParameter, match="no model"):
            engine.add(Request(0, [1], params, max_tokens=2))


def test_instant_runs_as_many_as_it_may() -> None:
    engine, _ = instant.build(EngineConfig.from_flat({"backend": "instant", "max_num_seqs": 2}))
    for number in range(5):
        engine.add(Request(number, [1, number], SamplingParams(), max_tokens=3))
    assert [output.request_id for output in engine.step()] == [0, 1]
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 3)
    engine.abort(1)
    seen = [output.request_id for _ in range(9) for output in engine.step()]
    assert sorted(seen) == [0, 0, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert not engine.has_work


def test_instant_is_for_servers() -> None:
    with pytest.raises(ConfigError, match="octavo serve"):
        LLM(backend="instant")
