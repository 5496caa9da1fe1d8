"""Lets one request in for each round of the event loop.

A request's first stretch, from its headers to its prompt on the way to the tokenizer, takes part of a millisecond.
Fifty that come together would be one long round, and the tokens of everybody else would wait for its end.
"""

from __future__ import annotations

import asyncio
from collections import deque


class RequestPacer:
    """First come, first served; between two, the event loop looks what else there is."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_taken = False
        """Whether somebody was let in in this round."""

    async def enter(self) -> None:
        """Wait for this one's turn; alone, it need not wait."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._turn)
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # who was cancelled has no turn
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._turn)
                return
        self._is_taken = False
