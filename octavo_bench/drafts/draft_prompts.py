"""Prompts of the kinds of work that speculative decoding is measured on; those of one kind differ in their texts."""

from __future__ import annotations

from collections.abc import Callable

KINDS = ("chat", "code", "edit", "extract", "repeat")
"""Questions, programs, texts to be rewritten with a change, texts to take a part from, and texts to be said again."""

TOPICS = (
    "a lighthouse keeper who finds a letter in a bottle",
    "why the sky is blue at noon and red in the evening",
    "how to bake bread without yeast",
    "the history of the printing press",
    "what to pack for a week of hiking in the mountains",
    "how vaccines train the immune system",
    "a robot that learns to paint",
    "the difference between weather and climate",
    "how to prepare for a job interview",
    "a village that lost its clock tower in a storm",
    "how tides are caused by the moon",
    "what makes a good friend",
)
FUNCTIONS = (
    "counts the words of a text and returns the ten most frequent ones",
    "checks whether a string is a palindrome, ignoring case and spaces",
    "merges two sorted lists into one sorted list",
    "reads a CSV file and prints the average of each column",
    "finds all prime numbers below n with the sieve of Eratosthenes",
    "computes the n-th Fibonacci number with a loop",
    "reverses the order of the words of a sentence",
    "counts how often each letter occurs in a string",
    "converts a temperature from Celsius to Fahrenheit and back",
    "implements a stack with push, pop and peek",
    "returns the greatest common divisor of two numbers",
    "removes the duplicates of a list and keeps its order",
)
PEOPLE = (
    *("Anna Keller", "Bruno Silva", "Chen Wei", "Dora Novak", "Emil Hansen", "Fatima Zahra"),
    *("Goran Petrov", "Hana Sato", "Ivan Kral", "Julia Meyer", "Karim Aziz", "Lena Brandt"),
)
CITIES = ("Lisbon", "Oslo", "Prague", "Kyoto", "Tunis", "Quito", "Dublin", "Hanoi", "Riga", "Accra", "Turin", "Perth")
LETTER = """Dear {name},

thank you for your order of {count} chairs and {tables} tables, which we received on Monday. The goods will leave our \
warehouse in {city} on the {day}th of March and should reach you within five working days. Our driver will call you \
one hour before the delivery. Please check the goods before you sign the receipt, and tell us at once if anything is \
missing or damaged. The invoice of {price} euros is due within thirty days. If you have questions, write to our office \
in {city} or call us on weekdays between nine and five.

With kind regards,
the sales team"""


WISHES = (
    *("Tell me about {}.", "Explain to a child: {}.", "Give me three facts about this: {}.", "Write a poem on {}."),
    *("Write a short dialogue of two friends about {}.", "What should everybody know about {}?"),
)
LANGUAGES = ("Python", "JavaScript", "C", "Java", "Go", "Rust")


def prompts_of(kind: str, first: int, count: int) -> list[str]:
    """``count`` user messages of a kind, from number ``first`` on. Chat and code repeat themselves after 72."""
    return [MAKERS[kind](number) for number in range(first, first + count)]


def _letter(number: int) -> str:
    return LETTER.format(
        name=PEOPLE[number % len(PEOPLE)],
        city=CITIES[(5 * number + 1) % len(CITIES)],
        count=6 + 2 * number,
        tables=2 + number,
        day=11 + number % 9,
        price=400 + 35 * number,
    )


def _chat(number: int) -> str:
    topic = TOPICS[number % len(TOPICS)]
    return WISHES[(number + number // len(TOPICS)) % len(WISHES)].format(topic)


def _code(number: int) -> str:
    language = LANGUAGES[number // len(FUNCTIONS) % len(LANGUAGES)]
    return f"Write a {language} function that {FUNCTIONS[number % len(FUNCTIONS)]}, with a short example."


def _edit(number: int) -> str:
    name = PEOPLE[(number + 5) % len(PEOPLE)]
    return f"Rewrite this letter. Address it to {name}, and change nothing else.\n\n{_letter(number)}"


def _extract(number: int) -> str:
    return f"{_letter(number)}\n\nQuote the sentences of this letter that say when and from where the goods are sent."


def _repeat(number: int) -> str:
    return f"Repeat the following letter word for word.\n\n{_letter(number)}"


MAKERS: dict[str, Callable[[int], str]] = {
    "chat": _chat,
    "code": _code,
    "edit": _edit,
    "extract": _extract,
    "repeat": _repeat,
}
