"""Requests that come together are begun one by one, and the event loop looks around in between."""

from __future__ import annotations

import asyncio

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
        await asyncio.wait_for(asyncio.gather(first, last), 5)

    asyncio.run(check())
