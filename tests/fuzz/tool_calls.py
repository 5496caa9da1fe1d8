"""What a model writes: a message means the same however it is cut, and takes time in proportion to its length.

The first line is the format; the others are the message.
"""

from __future__ import annotations

import random
import time

from octavo.text.message_parser import Call
from tests.fuzz.target import Fault, Target
from tests.text.tool_calls.messages import CASES, FORMATS, parse

SHORT, LONG = 500, 4_000
"""Characters of the message, repeated, whose times are compared."""
MAX_GROWTH = 4 * LONG / SHORT
NOTICED_SECONDS = 0.05
"""Less is not compared: the clock and the interpreter's own work would decide."""


def make() -> Target:
    return ToolCalls()


class ToolCalls(Target):
    seeds = [f"{name}\n{text}".encode() for name, text, _ in CASES]
    words = tuple({word.encode() for _, text, _ in CASES for word in text.replace("<", " <").split() if len(word) < 40})

    def read(self, data: bytes) -> None:
        name, _, text = data.decode(errors="replace").partition("\n")
        format = name if name in FORMATS else sorted(FORMATS)[len(name) % len(FORMATS)]
        pieces, rng = parse(format, [text]), random.Random(len(text))
        places = sorted(rng.randrange(len(text) + 1) for _ in range(12))
        cut = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
        if (found := parse(format, cut)) != pieces:
            raise Fault(f"{format}: {found} in place of {pieces}, cut at {places}")
        for piece in pieces:
            if isinstance(piece, Call) and not piece.is_cut and not piece.arguments.startswith("{"):
                raise Fault(f"{format}: arguments {piece.arguments}")  # what is in an object is passed on as it is
        if text:
            self._check_time(format, text)

    def _check_time(self, format: str, text: str) -> None:
        for _ in range(3):  # the machine may be busy
            short, long = (_seconds(format, text, length) for length in (SHORT, LONG))
            if long < NOTICED_SECONDS or long <= MAX_GROWTH * short:
                return
        raise Fault(f"{format}: {short:.3f} s for {SHORT} characters, {long:.3f} s for {LONG}")


def _seconds(format: str, text: str, length: int) -> float:
    """The time of a message of about ``length`` characters, ``text`` again and again, as a model writes it."""
    whole = (text * (1 + length // len(text)))[:length]
    pieces = [whole[start : start + 4] for start in range(0, length, 4)]
    started = time.thread_time()
    parse(format, pieces)
    return time.thread_time() - started
