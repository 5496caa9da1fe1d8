"""Text for the training of a drafter: the model's own answers to built-in user messages and to messages of its own."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from octavo.config import EngineConfig
from octavo.text.tokenizer import Tokenizer
from octavo_bench.drafts.draft_prompts import KINDS, prompts_of
from octavo_bench.drafts.speculate import MARK, ChatFormat, Side, SpeculationWork

FIRST_LETTER = 1000
"""Number of the first letter; lower ones are for measurements."""
MOST_HELD = 1024
MESSAGE_TOKENS = 48
MESSAGE_TEMPERATURE = 0.9
MESSAGES_SHARE = 0.5
"""Of the time for generation, at most."""
OPENINGS = ("", "Write a", "", "Explain", "", "What", "", "Describe", "", "How", "", "Tell", "", "Why", "", "Give me")
"""What the messages that the model writes itself begin with."""


class DraftText(NamedTuple):
    """A prompt in the model's chat format, and the answer."""

    tokens: list[int]
    num_prompt_tokens: int


class WantedTexts(NamedTuple):
    """How much text to generate."""

    num_answers: int
    answer_tokens: int
    """Most tokens of an answer."""
    temperature: float
    max_generation_seconds: float
    """What is not finished by then is cut off."""


class DraftTexts(NamedTuple):
    """Answers to different messages."""

    used: list[DraftText]
    held: list[DraftText]
    """Greedy ones, which are not for training."""


def generate(config: EngineConfig, wanted: WantedTexts, seed: int) -> DraftTexts:
    """Answers to messages in random order. Raises ``ConfigError`` for a model without a tokenizer."""
    chat, side = ChatFormat(config.model), Side(config)
    started = time.perf_counter()
    until = started + wanted.max_generation_seconds
    messages = _messages(side, chat, wanted.num_answers, started + MESSAGES_SHARE * wanted.max_generation_seconds)
    prompts = [prompt for message in messages if len(prompt := chat.prompt(message)) < side.info.max_model_len]
    random.Random(seed).shuffle(prompts)
    num_held = min(MOST_HELD, len(prompts) // 10)
    held, rest = prompts[:num_held], prompts[num_held:]
    asked = [rest[i % len(rest)] for i in range(wanted.num_answers)]
    greedy = _answers(side, held, SpeculationWork((), (), wanted.answer_tokens, 0.0, 0), math.inf)
    return DraftTexts(
        _answers(side, asked, SpeculationWork((), (), wanted.answer_tokens, wanted.temperature, 0), until), greedy
    )


def _answers(side: Side, prompts: Sequence[list[int]], work: SpeculationWork, until: float) -> list[DraftText]:
    answered = zip(prompts, side.run(prompts, work, until).tokens, strict=True)
    return [DraftText(prompt + answer, len(prompt)) for prompt, answer in answered if answer]


def _messages(side: Side, chat: ChatFormat, num_wanted: int, until: float) -> list[str]:
    """Built-in messages, and those that the model writes, where a user would, and ends before ``until``."""
    letters = [prompts_of(kind, FIRST_LETTER, max(40, num_wanted // 100)) for kind in ("edit", "extract", "repeat")]
    messages = [*training_messages(), *itertools.chain.from_iterable(letters)]
    num_own = num_wanted - len(messages)
    if not chat.is_chat or num_own <= 0:
        return messages
    starts = [chat.tokenizer.encode(opening, add_special_tokens=False) for opening in OPENINGS]
    before = chat.tokenizer.encode(chat.before, add_special_tokens=False)
    begun = [starts[i % len(starts)] for i in range(num_own)]
    work = SpeculationWork((), (), MESSAGE_TOKENS, MESSAGE_TEMPERATURE, 0)
    run = side.run([before + start for start in begun], work, until)
    eos_ids = side.info.eos_token_ids
    own = {_complete(chat.tokenizer, start + rest, eos_ids) for start, rest in zip(begun, run.tokens, strict=True)}
    measured = {prompt for kind in KINDS for prompt in prompts_of(kind, 0, FIRST_LETTER)}
    return messages + sorted(own - measured - {""})


def _complete(tokenizer: Tokenizer, tokens: Sequence[int], eos_ids: Sequence[int]) -> str:
    """A message that the model ended itself, "" for others."""
    if not tokens or tokens[-1] not in eos_ids:
        return ""
    text = tokenizer.decode(list(tokens[:-1])).strip()
    return text if MARK not in text and len(text) >= 8 else ""


SUBJECTS = (
    *("a bakery at dawn", "black holes", "the water cycle", "a lost umbrella", "learning to swim", "public libraries"),
    *("how bridges carry their load", "a journey by night train", "growing tomatoes", "chess openings", "the Vikings"),
    *("why leaves turn yellow", "saving money as a student", "an old violin", "electric cars", "sleep and memory"),
    *("the human heart", "moving to a new city", "a dragon who is afraid of fire", "volcanoes", "working from home"),
    *("the invention of the telephone", "healthy breakfasts", "a garden in winter", "how the internet works"),
    *(
        "the Olympic games",
        "making new friends",
        "plastic in the oceans",
        "a detective with a bad memory",
        "honey bees",
    ),
    *("time zones", "first aid for a burn", "the French Revolution", "learning a language", "a ship in a storm"),
)
REQUESTS = (
    *("Write a paragraph about {}.", "What is interesting about {}?", "Write a short story on the subject of {}."),
    *("List five facts or ideas about {}.", "Summarise what you know about {}.", "Give advice on {}."),
    *("Write an e-mail to a friend about {}.", "What are common mistakes about {}?", "Explain {} step by step."),
)
TASKS = (
    *("sorts a list of numbers with bubble sort", "finds the largest element of a list", "checks whether n is prime"),
    *("converts a number to binary", "counts the vowels of a string", "computes the factorial of n"),
    *("searches a sorted list with binary search", "adds two matrices", "prints a multiplication table"),
    *("reads a file and counts its lines", "implements a queue", "finds duplicates in a list"),
    *("computes the mean and the median of a list", "validates an e-mail address", "rotates a list by k places"),
    *("parses a date", "flattens a nested list", "computes the distance of two points", "inverts a dictionary"),
    *("generates a random password", "finds the longest word of a sentence", "sums the digits of a number"),
)
SETTINGS = (
    *("Write a Python function that {}.", "Write a JavaScript function that {}.", "Show code in Java that {}."),
    *("Write a C program that {}.", "Explain and write code that {}.", "Write a Python class with a method that {}."),
)


def training_messages() -> list[str]:
    """All messages, in order."""
    chat = [wish.format(subject) for subject, wish in itertools.product(SUBJECTS, REQUESTS)]
    return chat + [wish.format(task) for task, wish in itertools.product(TASKS, SETTINGS)]
