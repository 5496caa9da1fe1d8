"""User messages from which text for the training of a drafter is generated; those of ``draft_prompts`` differ."""

from __future__ import annotations

import itertools

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
