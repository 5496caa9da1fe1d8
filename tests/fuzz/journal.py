"""A journal with truncations, flipped bits and foreign parts: no request gets tokens that it did not have.

The first byte says what the others are: the log file, or, if it is odd, one more record with a right checksum.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from functools import partial
from pathlib import Path

from octavo.config import ServeConfig
from octavo.sampling_params import SamplingParams
from octavo.types import Output, Request
from octavo_server.durable.journal import Journal
from octavo_server.durable.records import Begin, Noted, RequestHead, encode
from octavo_server.durable.requests import DurableRequest
from octavo_server.durable.synced_log import Damage, LogFile, LogWriter, log_files
from tests.fuzz.target import Fault, Target
from tests.server.in_process import InProcessEngine, byte_tokenizer

FILE, RECORD = b"\x00", b"\x01"


def make() -> Target:
    return JournalFolder()


class JournalFolder(Target):
    def __init__(self) -> None:
        super().__init__()
        self._logger = logging.getLogger("octavo.server")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)
        self._answers, written = asyncio.run(_write_journal(self.folder / "written"))
        self._content = written.path.read_bytes()
        self._file = LogFile(self.folder / "read" / written.path.name)
        self._engine, self._tokenizer = InProcessEngine(), byte_tokenizer()
        records = written.read(Damage())
        self.seeds = [FILE + self._content, *(RECORD + record for record in records)]

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        return data[:1] + super().mutate(data[1:], rng)

    def read(self, data: bytes) -> None:
        shutil.rmtree(self._file.path.parent, ignore_errors=True)
        self._file.path.parent.mkdir()
        is_record = bool(data[:1]) and data[0] % 2 == 1
        self._file.path.write_bytes(self._content + self._file.frame(data[1:]) if is_record else data[1:])
        config = ServeConfig.from_flat({"model": "test"})
        journal = Journal(self._file.path.parent, 600.0, config, self._engine, self._tokenizer)
        try:
            for request in () if is_record else journal._requests.values():
                self._check(request)
        finally:
            journal.close()

    def close(self) -> None:
        self._logger.setLevel(self._level)
        super().close()

    def _check(self, request: DurableRequest) -> None:
        written: dict[int, list[int]] = {}
        _, outputs = request._content()
        for index, output in outputs:
            written.setdefault(index, []).extend(output.tokens)
        for index, tokens in written.items():
            right = self._answers[request.head.key][index]
            if tokens != right[: len(tokens)]:
                raise Fault(f"{request.head.key} has tokens {tokens}, not {right}")


async def _write_journal(folder: Path) -> tuple[dict[str, list[list[int]]], LogFile]:
    """A journal with six live requests of two choices: their tokens by key, and the file."""
    rng, answers = random.Random(1), {}
    writer = LogWriter(folder)
    for number in range(1, 7):
        requests = [Request(index, [1, 2, 3], 40, SamplingParams()) for index in range(2)]
        head = RequestHead(number, "", f"key{number}", "body", "print", "", "", len(requests))
        writer.append(partial(encode, [(head, Begin("u", 1, requests, [0, 1], ["a", None], []))]))
        tokens: list[list[int]] = [[], []]
        places = [0, 0]
        for _ in range(20):
            index, new = rng.randrange(2), [rng.randrange(256) for _ in range(rng.randrange(1, 4))]
            writer.append(partial(encode, [Noted(number, sum(places), index, Output(0, new))]))
            tokens[index] += new
            places[index] += len(new)
        answers[head.key] = tokens
    await writer.synced()
    writer.close()
    (file,) = log_files(folder)
    return answers, file
