"""``adapter`` in this process: equal to the model that PEFT merges the adapter into."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from octavo import LLM, ConfigError, Engine, InvalidParameter, SamplingParams
from tests.models.adapter_files import make_adapter
from tests.models.families import VOCAB_SIZE, make_checkpoint

PROMPT = random.Random(0).choices(range(3, VOCAB_SIZE), k=40)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 16, "num_kv_blocks": 64}


class Made:
    """A model with two adapters, and the settings to load them; ``models`` has the merged ones by name."""

    def __init__(self, home: Path) -> None:
        self.models: dict[str | None, PreTrainedModel] = {None: make_checkpoint(home / "base", "llama/gqa")}
        for seed, name in enumerate(("first", "second")):
            self.models[name] = make_adapter(home / "base", home / name, seed)
        modules = f"first={home / 'first'},second={home / 'second'}"
        self.settings = {"model": home / "base", "enable_lora": True, "lora_modules": modules, **SETTINGS}

    @torch.inference_mode()
    def check(self, adapter: str | None, tokens: list[int]) -> None:
        """Every token is what the merged model likes best."""
        logits = self.models[adapter](torch.tensor([[*PROMPT, *tokens]]), use_cache=False).logits[0]
        assert tokens == logits.argmax(dim=-1)[len(PROMPT) - 1 : -1].tolist(), adapter


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def adapted(made: Made) -> Iterator[LLM]:
    with LLM(**made.settings) as llm:
        yield llm


def test_an_adapter_gives_the_tokens_of_its_merged_model(made: Made, adapted: LLM) -> None:
    for _ in range(2):  # the second time with cached blocks, each with its own
        for adapter in made.models:
            (result,) = adapted.generate(PROMPT, GREEDY, adapter=adapter)
            made.check(adapter, result.outputs[0].token_ids)
            pieces = list(adapted.stream(PROMPT, GREEDY, adapter=adapter))
            assert [token for piece in pieces for token in piece.token_ids] == result.outputs[0].token_ids


def test_chat_applies_the_adapter(made: Made, adapted: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted, "chat_prompt", lambda *_, **__: {"prompt_token_ids": PROMPT})
    (result,) = adapted.chat([{"role": "user", "content": "Hi"}], GREEDY, adapter="second")
    made.check("second", result.outputs[0].token_ids)


def test_requests_of_an_engine_have_an_adapter_each(made: Made) -> None:
    with Engine(**made.settings) as engine:
        ids = {adapter: engine.add(PROMPT, GREEDY, adapter=adapter) for adapter in made.models}
        engine.run()
        for adapter, request_id in ids.items():
            made.check(adapter, engine.completed[request_id].outputs[0].token_ids)


@pytest.mark.parametrize("name", ["third", "", 5, []])
def test_an_unknown_adapter_is_refused_by_name(adapted: LLM, name: Any) -> None:
    for call in (adapted.generate, adapted.stream):
        with pytest.raises(InvalidParameter, match="there are first, second") as refused:
            call(PROMPT, GREEDY, adapter=name)
        assert refused.value.param == "adapter"


def test_without_adapters_none_can_be_chosen(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="enable_lora and lora_modules"):
        llm.generate("a", adapter="first")


def test_an_adapter_that_cannot_be_read_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        LLM(**{**made.settings, "lora_modules": f"first={tmp_path}"})
