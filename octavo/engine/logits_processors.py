"""Logits processors of other packages, by entry points: which tokens a request may sample next, given those so far.

An entry point of the group ``octavo.logits_processors`` is a factory. It is called with the ``extra_args`` of each
request that has some, and returns a ``Processor``, or ``None`` if the request is not its business. What processors say
becomes part of the sequence's masks, so nothing but masks reaches the device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import CANCELLATIONS, InvalidParameter

GROUP = "octavo.logits_processors"
logger = logging.getLogger(__name__)


class Allow(NamedTuple):
    """Only these tokens may come next."""

    token_ids: Collection[int]


class Ban(NamedTuple):
    """These tokens may not come next."""

    token_ids: Collection[int]


Processor = Callable[[Sequence[int], Sequence[int]], Allow | Ban | None]
"""Given prompt and output tokens, what may come next; ``None``: anything. It is called once for each token, and again
for the same tokens after a restart or with drafts, so its answer must depend on nothing else. It must be fast: the
device waits."""
Factory = Callable[[Mapping[str, Any]], Processor | None]


class Processors:
    """The processors of one sequence."""

    def __init__(self, processors: Sequence[tuple[str, Processor]], prompt: Sequence[int]) -> None:
        self._processors = processors
        self._prompt = prompt
        self.error: str | None = None
        """Why the last mask allows nothing, if a processor failed."""

    def allowed(self, output: Sequence[int], vocab_size: int) -> npt.NDArray[np.bool_]:
        """The tokens [V] that may follow ``output``; none of them if a processor fails."""
        mask = np.ones(vocab_size, dtype=np.bool_)
        for name, processor in self._processors:
            try:
                answer = processor(self._prompt, output)
                if answer is None:
                    continue
                named = _named(answer.token_ids, vocab_size)
                mask &= named if isinstance(answer, Allow) else ~named
            except CANCELLATIONS:
                raise
            except BaseException as error:  # a package's error ends this request only
                logger.exception("the logits processor %s failed", name)
                self.error = f"the logits processor {name} failed: {type(error).__name__}: {error}"
                return np.zeros(vocab_size, dtype=np.bool_)
        return mask


def _named(token_ids: Collection[int], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Which tokens [V] are in ``token_ids``; raises ``ValueError`` for one that is none."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    named = np.zeros(vocab_size, dtype=np.bool_)
    if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"it names a token that is not in 0 to {vocab_size - 1}")
    named[ids] = True
    return named


@functools.cache
def factories() -> dict[str, Factory]:
    """The installed factories by name, in alphabetical order."""
    return {entry.name: entry.load() for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def make_processors(extra_args: Mapping[str, Any] | None, prompt: Sequence[int]) -> Processors | None:
    """The processors for a request. Raises ``InvalidParameter`` if no factory knows its arguments, or one fails."""
    if extra_args is None:
        return None
    made = []
    for name, factory in factories().items():
        try:
            processor = factory(extra_args)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            raise InvalidParameter("extra_args", f"'extra_args' is refused by {name}: {error}") from error
        if processor is not None:
            made.append((name, processor))
    if not made:
        installed = ", ".join(factories()) or "none"
        message = f"'extra_args' is known to no logits processor; installed (entry points of {GROUP}): {installed}."
        raise InvalidParameter("extra_args", message)
    return Processors(made, prompt)
