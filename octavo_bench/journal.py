"""How fast a server reads its journal: one as a busy server leaves it is written, and read.

Half of it is the beginning of a file, with all that was kept when the file was begun, and half is what steps add:
some sequences at a time, each with a token per step, that end and are followed by others.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from octavo.config import ServeConfig
from octavo.sampling_params import SamplingParams
from octavo.system.collector import without_collections
from octavo.types import Output, Request, TokenLogprobs
from octavo_server.durable.journal import MAX_RETAINED_BYTES, ROLL_BYTES, Journal
from octavo_server.durable.log import Damage, LogFile, log_files
from octavo_server.durable.records import (
    Begin,
    Ended,
    Forgotten,
    Note,
    Noted,
    RequestHead,
    encode,
    encode_ended,
    merged,
    pack,
)
from octavo_server.durable.recovery import read_logs
from octavo_server.durable.requests import DurableRequest

VOCAB_SIZE = 150_000
PROMPT_TOKENS = (16, 2000)
OUTPUT_TOKENS = (16, 600)
HISTORY_PROMPT_TOKENS = (1000, 30_000)
HISTORY_OUTPUT_TOKENS = (16, 200)
"""Of a history: long prompts, so that it is written in minutes."""
NUM_CONTENTS = 100
"""Different prompts and outputs of a history."""
STEPS_PER_SYNC = 50
LOGPROBS_SHARE = 0.1
"""Of requests: those that ask for the log probabilities of two tokens at each position."""


class _Sequence:
    """One request and the outputs that it still gets."""

    def __init__(
        self,
        number: int,
        source: random.Random,
        prompt_tokens: tuple[int, int] = PROMPT_TOKENS,
        output_tokens: tuple[int, int] = OUTPUT_TOKENS,
    ) -> None:
        prompt = _tokens(source.randint(*prompt_tokens), source)
        request = Request(number, prompt, SamplingParams(), OUTPUT_TOKENS[1])
        self.head = RequestHead(number, "", f":{number:032x}", "0" * 32, "0" * 32, "", "", 1)
        self.begin = Begin("0" * 32, 1_700_000_000, [request], [0], ["word " * len(prompt)], [])
        tokens = _tokens(source.randint(*output_tokens), source)
        has_logprobs = source.random() < LOGPROBS_SHARE
        self.outputs = [(0, Output(1, [token], logprobs=_logprobs(token, has_logprobs))) for token in tokens]
        self.outputs[0][1].num_cached_tokens = 16
        self.outputs[-1][1].finish_reason = "length"
        self.place = 0

    def next_note(self) -> Noted:
        index, output = self.outputs[self.place]
        self.place += 1
        return Noted(self.head.number, self.place - 1, index, output)

    def packed(self) -> Ended:
        return pack(self.head, self.begin, merged(self.outputs))


def _tokens(count: int, source: random.Random) -> list[int]:
    return source.choices(range(VOCAB_SIZE), k=count)


def _logprobs(token: int, is_wanted: bool) -> list[TokenLogprobs] | None:
    return [TokenLogprobs(token, -1.25, 1, [token, 7], [-1.25, -2.5])] if is_wanted else None


def write(folder: Path, num_bytes: int, num_live: int, seed: int = 0) -> int:
    """Write one log file of about ``num_bytes``, with ``num_live`` sequences at a time. Returns the tokens in it."""
    source = random.Random(seed)
    numbers = itertools.count(1 << 32)
    kept: deque[tuple[int, int]] = deque()
    """Number and bytes of ended requests."""
    num_kept_bytes = num_tokens = 0
    log = LogFile.next(folder, 1)
    with log.path.open("wb") as file:
        while file.tell() < num_bytes // 2:
            sequence = _Sequence(next(numbers), source)
            payload = encode_ended(sequence.packed())
            kept.append((sequence.head.number, len(payload)))
            num_kept_bytes += len(payload)
            num_tokens += len(sequence.outputs)
            file.write(log.frame(payload))
        live: list[_Sequence] = []
        while file.tell() < num_bytes:
            notes: list[Note] = []
            while len(live) < num_live:
                live.append(_Sequence(next(numbers), source))
                notes.append((live[-1].head, live[-1].begin))
            notes += [sequence.next_note() for sequence in live]
            num_tokens += len(live)
            for sequence in filter(_is_ended, live):
                size = sequence.packed().size
                kept.append((sequence.head.number, size))
                num_kept_bytes += size
            live = [sequence for sequence in live if not _is_ended(sequence)]
            while num_kept_bytes > MAX_RETAINED_BYTES:
                number, size = kept.popleft()
                num_kept_bytes -= size
                notes.append(Forgotten(number))
            file.write(log.frame(encode(notes)))
    return num_tokens


def _is_ended(sequence: _Sequence) -> bool:
    return sequence.place == len(sequence.outputs)


def read(folder: Path) -> tuple[float, int, int]:
    """Read the log as a server does when it starts. Returns seconds, and how many requests have ended and have not."""
    begun = time.perf_counter()
    damage = Damage()
    contents: list[object] = []
    with without_collections():
        found = read_logs(log_files(folder), damage)
        for request in found:
            contents.append(request.packed() if request.is_ended else request.content(damage))
    seconds = time.perf_counter() - begun
    if damage.records or damage.tail_bytes:
        raise RuntimeError("the log that was written could not be read")
    num_ended = sum(request.is_ended for request in found)
    return seconds, num_ended, len(found) - num_ended


class _History:
    """A journal as a server writes it that runs for long: full files are replaced, old requests forgotten."""

    def __init__(self, folder: Path, num_live: int) -> None:
        nothing = SimpleNamespace(own=lambda *_: None)
        self._ids = itertools.count()
        engine: Any = SimpleNamespace(
            metrics=SimpleNamespace(journal=Counter()),
            timelines=nothing,
            next_id=lambda: next(self._ids),
            add=lambda *_: None,
        )
        self._journal = Journal(folder, 600.0, ServeConfig(), engine, None)
        self._folder = folder
        self._num_live = num_live
        self._numbers = itertools.count(1)
        source = random.Random(0)
        ranges = HISTORY_PROMPT_TOKENS, HISTORY_OUTPUT_TOKENS
        self._contents = [_Sequence(number, source, *ranges) for number in range(NUM_CONTENTS)]
        self.most_bytes = 0
        """In the folder, at any time."""

    async def write(self, num_bytes: int) -> int:
        """Write at least so many bytes, and stop when the next file is about to be begun. Returns the bytes."""
        live: list[tuple[DurableRequest, _Sequence, int]] = []
        before = _written()
        for step in itertools.count(1):
            while len(live) < self._num_live:
                live.append((*self._begin(), 0))
            for request, content, place in live:
                request.on_output(*content.outputs[place])
            live = [(each, content, place + 1) for each, content, place in live if not each.is_ended]
            await asyncio.sleep(0)
            if step % STEPS_PER_SYNC == 0:
                await self._journal.synced()
                self.most_bytes = max(self.most_bytes, _size(self._folder))
                limit = max(ROLL_BYTES, 2 * self._journal._snapshot_bytes)
                if _written() - before > num_bytes and self._journal._writer.num_bytes > 0.9 * limit:
                    break
        return _written() - before

    def _begin(self) -> tuple[DurableRequest, _Sequence]:
        number = next(self._numbers)
        content = self._contents[number % NUM_CONTENTS]
        head = RequestHead(number, "", f":{number:032x}", "0" * 32, "0" * 32, "", "", 1)
        request = DurableRequest(self._journal, head, content.begin)
        self._journal._requests[number] = request
        self._journal.note((head, content.begin))
        request.submit()
        return request, content


def _written() -> int:
    """Bytes that this process has written so far (proc(5))."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def _size(folder: Path) -> int:
    return sum(file.path.stat().st_size for file in log_files(folder))


def measure(megabytes: float, sequences: int, rounds: int, history: bool = False) -> dict[str, Any]:
    """Write a log to a temporary folder, or with ``history`` so much as a server does; and read what is there some
    times."""
    num_bytes = round(megabytes * 1_000_000)
    with tempfile.TemporaryDirectory(prefix="octavo_journal_") as place:
        folder = Path(place) / "journal"
        if history:
            writer = _History(folder, sequences)
            told = {"written_bytes": asyncio.run(writer.write(num_bytes)), "most_bytes": writer.most_bytes}
        else:
            folder.mkdir()
            told = {"tokens": write(folder, num_bytes, sequences), "sequences_at_a_time": sequences}
        size = _size(folder)
        runs = [read(folder) for _ in range(rounds)]
    median = statistics.median(run[0] for run in runs)
    speed = {"median_s": round(median, 3)} if history else {"mb_per_s": round(size / median / 1e6, 1)}
    return {
        "read_bytes" if history else "bytes": size,
        **told,
        "ended": runs[0][1],
        "unfinished": runs[0][2],
        "seconds": [round(run[0], 3) for run in runs],
        **speed,
    }
