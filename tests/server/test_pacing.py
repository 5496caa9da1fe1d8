"""Requests that come together are begun one by one, and the event loop looks around in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import pytest
from starlette.requests import ClientDisconnect

from octavo_server.http import middleware
from octavo_server.http.middleware import RequestPacer


def test_one_enters_in_each_round_and_others_run_in_between() -> None:
    seen: list[str] = []

    async def request(pacer: RequestPacer, number: int) -> None:
        await pacer.enter("")
        seen.append(f"request {number}")

    async def check() -> None:
        loop, pacer = asyncio.get_running_loop(), RequestPacer()

        def step() -> None:
            seen.append("step")
            if sum(name != "step" for name in seen) < 20:
                loop.call_soon(step)

        requests = [asyncio.create_task(request(pacer, number)) for number in range(20)]
        loop.call_soon(step)
        await asyncio.gather(*requests)

    asyncio.run(check())
    assert [name for name in seen if name != "step"] == [f"request {number}" for number in range(20)]
    runs = " ".join("r" if name != "step" else "s" for name in seen)
    assert "r r" not in runs, "two in one round"


def test_a_single_body_does_not_wait_and_one_that_ends_early_delays_none() -> None:
    async def check() -> None:
        pacer = RequestPacer()
        for _ in range(3):
            entering = pacer.enter("")
            try:
                entering.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            await asyncio.sleep(0)
        first, gone, last = [asyncio.create_task(pacer.enter("")) for _ in range(3)]
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(asyncio.gather(first, last), 30)

    asyncio.run(check())


def test_a_refused_key_has_one_turn_in_a_while_and_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "PAUSE", 0.02)
    begun: list[tuple[str, float]] = []

    async def request(pacer: RequestPacer, owner: str) -> None:
        await pacer.enter(owner)
        begun.append((owner, asyncio.get_running_loop().time()))
        pacer.note(owner, owner == "flood")

    async def check() -> None:
        pacer = RequestPacer()
        pacer.note("flood", True)
        requests = [asyncio.create_task(request(pacer, owner)) for owner in ["flood"] * 5 + ["other"] * 20]
        await asyncio.gather(*requests)
        pacer.note("flood", False)
        with pytest.raises(StopIteration):
            pacer.enter("flood").send(None)

    asyncio.run(check())
    assert [owner for owner, _ in begun] == ["other"] * 20 + ["flood"] * 5
    times = [time for owner, time in begun if owner == "flood"]
    assert all(later - earlier >= 0.019 for earlier, later in itertools.pairwise(times))


def test_clients_that_left_use_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "PAUSE", 0.3)
    outcomes: list[str] = []

    async def request(pacer: RequestPacer, is_gone: bool) -> None:
        with contextlib.suppress(ClientDisconnect):
            await pacer.enter("flood", lambda: is_gone)
            outcomes.append("begun")
            return
        outcomes.append("left")

    async def check() -> None:
        pacer = RequestPacer()
        pacer.note("flood", True)
        requests = [request(pacer, is_gone) for is_gone in [True] * 10 + [False]]
        await asyncio.wait_for(asyncio.gather(*requests), 2.5)

    asyncio.run(check())
    assert outcomes == ["left"] * 10 + ["begun"]
