"""How the news of a stream is written: at once, once a pass, in order, and by the task when that cannot be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.sampling_params import SamplingParams
from octavo.types import Output, Request
from octavo_server.generation import GeneratedChoice, Generation, Prompt
from octavo_server.http.response import EventStream
from octavo_server.http.server import WRITE_PIECE


class CountedWriter:
    """Shows the number of new tokens; ``fail`` makes it raise."""

    def __init__(self) -> None:
        self.fail = False

    def frames(self, choice: GeneratedChoice) -> bytes:
        if self.fail:
            raise ZeroDivisionError
        tokens = choice.take().tokens
        return b"".join(b"%d:%d " % (choice.index, token) for token in tokens)

    def last_frames(self) -> bytes:
        return b"last "


class Engine:
    """Forgets requests."""

    def abort(self, request_id: int) -> None:
        pass


class Stream:
    """A stream of ``n`` choices on this event loop, without a server; ``writes`` and ``sends`` are what it did."""

    def __init__(self, n: int, takes: Callable[[bytes], bool]) -> None:
        self.generation = Generation(Engine())  # type: ignore[arg-type]
        for index in range(n):
            request = Request(index, [1], SamplingParams(), max_tokens=1000)
            self.generation.add(Prompt([1], None), request)
        self.writer = CountedWriter()
        self.writes: list[bytes] = []
        self.sends: list[bytes] = []
        self.takes = takes
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        answer = EventStream(self.generation, self.writer, {})
        await answer({"type": "http", WRITE_PIECE: self._write}, self._receive, self._send)

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        await self.may_send.wait()
        if message["type"] == "http.response.body":
            self.sends.append(message["body"])
            self.writes.append(message["body"])

    def _write(self, data: bytes) -> bool:
        if not self.takes(data):
            return False
        self.writes.append(data)
        return True

    def tell(self, token: int, is_last: bool = False) -> None:
        for choice in list(self.generation.choices):
            choice.on_output(Output(choice.index, [token], "length" if is_last else None))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_pass_is_one_write_whatever_it_brings_and_wakes_no_task() -> None:
    async def check() -> None:
        stream = Stream(3, takes=lambda data: True)
        await settle()
        stream.tell(0)
        await settle()
        assert stream.sends == [b"0:0 1:0 2:0 "], "the first goes with the head"
        stream.tell(1)
        stream.tell(2)
        await settle()
        assert stream.writes[1:] == [b"0:1 0:2 1:1 1:2 2:1 2:2 "]
        stream.tell(3, is_last=True)
        await stream.task
        assert stream.sends[1:] == [b"0:3 1:3 2:3 last data: [DONE]\n\n"]

    asyncio.run(check())


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_swapped_when_the_client_is_slow_now_and_then(seed: int) -> None:
    source = random.Random(seed)

    async def check() -> None:
        stream = Stream(1, takes=lambda data: source.random() < 0.5)
        await settle()
        for token in range(200):
            if source.random() < 0.2:
                (stream.may_send.clear if source.random() < 0.5 else stream.may_send.set)()
            stream.tell(token, is_last=token == 199)
            for _ in range(source.randrange(4)):
                await asyncio.sleep(0)
        stream.may_send.set()
        await asyncio.wait_for(stream.task, 30)
        wanted = b"".join(b"0:%d " % token for token in range(200)) + b"last data: [DONE]\n\n"
        assert b"".join(stream.writes) == wanted

    asyncio.run(check())


def test_a_writer_that_fails_ends_the_answer_and_does_not_leave_it_hanging() -> None:
    async def check() -> None:
        stream = Stream(1, takes=lambda data: True)
        await settle()
        stream.tell(0)
        await settle()
        stream.writer.fail = True
        stream.tell(1)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(stream.task, 30)

    asyncio.run(check())
