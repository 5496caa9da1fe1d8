"""Text for the training of a drafter: the model's own answers to built-in user messages and to messages of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.text.chat_template import load_chat_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.hub import resolve_model
from octavo_bench.draft_prompts import prompts_of
from octavo_bench.draft_training_prompts import training_messages
from octavo_bench.speculate import Side, Work

MARK = "<<<message>>>"
FIRST_LETTER = 1000
"""Number of the first letter; lower ones are for measurements."""
MESSAGE_TOKENS = 48


class Text(NamedTuple):
    """A prompt in the model's chat format, and the answer."""

    tokens: list[int]
    num_prompt_tokens: int


class Wanted(NamedTuple):
    """How much text to generate."""

    num_answers: int
    max_tokens: int
    """Most tokens of an answer."""
    temperature: float


def generate(config: EngineConfig, wanted: Wanted, seed: int) -> list[Text]:
    """Answers, in random order. Raises ``ConfigError`` for a model without a tokenizer."""
    tokenizer = load_tokenizer(Path(config.model.tokenizer or resolve_model(config.model)))
    if tokenizer is None:
        raise ConfigError("bench train-draft: the model has no tokenizer")
    chat, rng = ChatFormat(config, tokenizer), random.Random(seed)
    side = Side(config)
    messages = _messages(side, chat, wanted.num_answers // 2)
    fitting = [prompt for message in messages if len(prompt := chat.prompt(message)) < side.info.max_model_len]
    prompts = [fitting[i % len(fitting)] for i in range(wanted.num_answers)]
    rng.shuffle(prompts)
    run = side.run(prompts, Work((), (), wanted.max_tokens, wanted.temperature, 0))
    return [Text(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, run.tokens, strict=True)]


class ChatFormat:
    """The text around a user message."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        template = load_chat_template(config.model, tokenizer)
        try:
            rendered = MARK if template.source is None else template.render([{"role": "user", "content": MARK}])
        finally:
            template.close()
        self.is_chat = template.source is not None
        self.before, _, self.after = rendered.partition(MARK)

    def prompt(self, message: str) -> list[int]:
        return self.tokenizer.encode(self.before + message + self.after, add_special_tokens=not self.is_chat)


def _messages(side: Side, chat: ChatFormat, num_own: int) -> list[str]:
    """Built-in messages, and those that the model writes where a user would."""
    letters = [prompts_of(kind, FIRST_LETTER, 40) for kind in ("edit", "extract", "repeat")]
    messages = [*training_messages(), *itertools.chain.from_iterable(letters)]
    if not chat.is_chat or not num_own:
        return messages
    start = chat.tokenizer.encode(chat.before, add_special_tokens=False)
    run = side.run([start] * num_own, Work((), (), MESSAGE_TOKENS, 1.0, 0))
    own = {_complete(chat.tokenizer, tokens, side.info.eos_token_ids) for tokens in run.tokens}
    return messages + sorted(own - {""})


def _complete(tokenizer: Tokenizer, tokens: Sequence[int], eos_ids: Sequence[int]) -> str:
    """A message that the model ended itself, "" for others."""
    if not tokens or tokens[-1] not in eos_ids:
        return ""
    text = tokenizer.decode(list(tokens[:-1])).strip()
    return text if MARK not in text and len(text) >= 8 else ""
