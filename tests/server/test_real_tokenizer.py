"""The default model's tokenizer behind the API: no character is ever broken, streamed or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.text.tokenizer import load_tokenizer
from tests.server import in_process
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.test_response import events

pytestmark = pytest.mark.model

SAMPLES = [
    "Plain words, and more of them. ",
    "naïve café – 日本語のテキスト 😀👩‍👩‍👧 ",
    "हिन्दी עברית русский ",
    "\n\n\tcode(); ",
]


@pytest.fixture(scope="module")
def served(default_model_path: Path) -> Iterator[Served]:
    tokenizer = load_tokenizer(default_model_path)
    assert tokenizer is not None
    patch = pytest.MonkeyPatch()
    patch.setattr(in_process, "VOCAB", tokenizer.vocab_size)
    # The model's own ends are ordinary tokens here, so that random sequences are used up.
    served = Served(InProcessEngine(answer=lambda request: request.prompt_tokens), tokenizer, {})
    yield served
    served.stop()
    patch.undo()


def test_pieces_of_60_random_answers_add_up(served: Served) -> None:
    tokenizer = served.app.state.services.first.tokenizer
    rng = random.Random(7)
    text_tokens = [token for sample in SAMPLES for token in tokenizer.encode(sample)]
    for number in range(60):
        if number % 2:
            tokens = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 40))]
        else:
            tokens = rng.sample(text_tokens, 30)
        body = {"prompt": tokens, "max_tokens": len(tokens), "ignore_eos": True}
        whole = served.complete(**body).json()["choices"][0]["text"]
        received = events(served.complete(**body, stream=True).content)
        assert "".join(event["choices"][0]["text"] for event in received) == whole == tokenizer.decode(tokens)


def test_text_survives_tokenize_and_detokenize(served: Served) -> None:
    for text in SAMPLES:
        tokens = served.client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert served.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def test_offsets_of_tokens_are_places_in_the_text(served: Served) -> None:
    text = "".join(SAMPLES)
    choice = served.complete(prompt=text, max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    lists = choice["logprobs"]
    assert choice["text"] == text
    for name, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert name.startswith("bytes:") or text.startswith(name, offset)
