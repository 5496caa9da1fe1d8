"""Starts at most one request per event loop iteration.

The synchronous start of a request, from its headers until its prompt goes to the tokenizer, takes a fraction of a
millisecond. Fifty at once would make one long iteration and delay the tokens of all streams.
"""

from __future__ import annotations

import asyncio

from octavo_server.tenants.places import TurnQueue


class RequestPacer:
    """API keys in turn, each first come, first served; the event loop runs other callbacks between two requests."""

    def __init__(self) -> None:
        self._waiting: TurnQueue[asyncio.Future[None]] = TurnQueue()
        self._is_taken = False
        """Whether a request was started in this iteration."""

    async def enter(self, owner: str) -> None:
        """Wait for this request's turn; returns at once without contention."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._turn)
            return
        turn = loop.create_future()
        self._waiting.push(owner, turn)
        await turn

    def _turn(self) -> None:
        while (found := self._waiting.pop()) is not None:
            _, turn = found
            if not turn.done():  # skip cancelled requests
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._turn)
                return
        self._is_taken = False
