"""The console in Chromium: the frame of the page and the live view of the engine. `make test-browser`."""

from __future__ import annotations

import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from octavo.telemetry.cache_view import CACHED, FREE, SHARED, CacheView, PrefixView, SessionView
from octavo.telemetry.request_events import Event
from octavo.types import EngineStats, Output
from tests.server.console.conftest import PHONE, says
from tests.server.in_process import InProcessEngine

MOST_BYTES = 250_000
"""That a page with formulas loads, but for their fonts."""
FORMULA = "$$\\frac{1}{2}$$"
SESSIONS = [SessionView("a", "", 3, 900, 800, 700, 100, 5.0, 9.0), SessionView("b", "key", 1, 9, 8, 0, 0, 2.0, 0.0)]
PREFIXES = [PrefixView(-1, 3, 1), PrefixView(0, 1, 0)]
VIEW = CacheView(1, [1, 3, SHARED, 1, CACHED, 2, FREE, 58], PREFIXES, False, 0.0, SESSIONS)


@pytest.mark.parametrize(("scheme", "options"), [("light", {}), ("dark", PHONE)])
def test_a_burst_is_seen_in_the_live_view(visit: Any, scheme: str, options: dict[str, Any]) -> None:
    engine = InProcessEngine(runs=False, views=[VIEW])
    opened = visit(engine, color_scheme=scheme, reduced_motion="reduce", **options)
    page = opened.page
    if options:
        page.click("#engine-button")
    for _ in range(50):
        opened.served.client.post("/v1/responses", json={"input": "Hi", "background": True})
    page.wait_for_selector("#requests tr:nth-child(50)")
    assert "50 live" in page.inner_text("#state")
    label = page.get_attribute("#cache", "aria-label")
    assert "1 requests" in label, label
    page.locator("#prefix-tree summary").click()
    assert page.locator(".chain").count() == 2
    page.locator("#session-list summary").click()
    assert page.locator("#sessions tr").all_inner_texts() == ["key: b\t1\t9\t8\t0\t2 s", "a\t3\t900\t800\t700\t5 s"]
    page.locator("#server-facts summary").click()
    assert page.inner_text("#served tbody td") == "test"
    opened.check()


def test_a_phone_shows_one_panel_at_a_time(visit: Any) -> None:
    opened = visit(InProcessEngine(), **PHONE)
    page = opened.page
    for name in ("engine", "history"):
        page.click(f"#{name}-button")
        assert page.is_visible(f"#{name}")
        opened.check()
        page.click(f"#{name}-button")
        assert not page.is_visible(f"#{name}")
    assert page.is_visible("#prompt")


def test_panels_and_theme_are_kept(visit: Any) -> None:
    opened = visit(InProcessEngine())
    page = opened.page
    page.click("#engine-button")
    page.click("#theme")
    page.reload()
    assert not page.is_visible("#engine")
    assert page.is_visible("#history")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("Control+Shift+E")
    assert page.is_visible("#engine")
    opened.check()


def test_what_the_page_loads_is_small(visit: Any) -> None:
    opened = visit(InProcessEngine(says(FORMULA)))
    opened.ask("Hi")
    opened.page.wait_for_selector(".katex")
    sizes = opened.page.evaluate(
        "performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
        ".filter((entry) => !entry.name.endsWith('.woff2')).map((entry) => entry.encodedBodySize)"
    )
    assert 100_000 < sum(sizes) < MOST_BYTES
    opened.check()


def test_the_page_asks_for_the_key_and_sends_it(visit: Any) -> None:
    opened = visit(InProcessEngine(says("Yes.")), {"api_key": "own"})
    page = opened.page
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "own")
    page.keyboard.press("Enter")
    page.wait_for_selector("#model option[value=test]", state="attached")
    opened.ask("Hi")
    page.goto(f"{opened.served.url}/docs")
    page.wait_for_selector(".operation")
    opened.problems = [problem for problem in opened.problems if "401" not in problem]
    opened.check()


def test_steps_are_shown_with_their_reasons_and_a_toy_engine_is_held(visit: Any) -> None:
    engine = InProcessEngine(views=[VIEW], architecture="toy")
    opened = visit(engine)
    page = opened.page
    page.wait_for_selector("#pace:not([hidden])")

    def note(number: int, outputs: list[Output], *events: Event) -> None:
        stats = EngineStats(num_steps=number, step_tokens=40, num_waiting=2)
        opened.served.call(lambda: engine.steps.note(stats, outputs, events, time.monotonic()))

    note(1, [], Event(1, "admitted", 0, 0, 0, tokens=16), Event(1, "chunk", 0, 0, 0, tokens=32, start=16))
    note(2, [Output(1, [1]), Output(2, [1, 2, 3], "stop", num_drafts=4, num_accepted_drafts=2)])
    page.wait_for_selector("#step-text:text('Step 2: 40 of at most')")
    rows = page.locator("#step-shares tr")
    assert "its next token" in rows.nth(0).inner_text()
    assert "4 drafts checked at once, 2 accepted ✓✓✗✗ and ends: stop" in rows.nth(1).inner_text()
    page.focus("#step-choice")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#step-text:text('Step 1:')")
    assert "admitted, 16 tokens found in the prefix cache; prompt from token 16, a part" in rows.nth(0).inner_text()
    for name, pace in (("Hold", 0), ("One step", 1), ("Go on", None)):
        page.click(f"#pace >> text={name}")
        opened.until(lambda pace=pace: engine.paces[-1:] == [pace])
    opened.check()


def test_the_shares_of_api_keys_are_shown(visit: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("".join(f"{name} {sha256(name.encode()).hexdigest()}\n" for name in ("ann", "bob")))
    engine = InProcessEngine(runs=False)
    opened = visit(engine, {"api_key_file": str(tmp_path / "keys"), "admin_key": "admin"})
    page = opened.page
    page.fill("#key", "ann")
    page.fill("#admin-key", "admin")
    page.keyboard.press("Enter")
    for number, name in enumerate(("ann", "bob"), 1):
        headers = {"Authorization": f"Bearer {name}"}
        opened.served.client.post("/v1/responses", json={"input": "Hi", "background": True}, headers=headers)
        page.wait_for_selector(f"#requests tr:nth-child({number})")
    outputs = [Output(1, [1, 2, 3, 4], num_drafts=5, num_accepted_drafts=3), Output(2, [1, 2], num_drafts=1)]
    opened.served.call(lambda: engine.steps.note(EngineStats(), outputs, [], time.monotonic()))
    page.wait_for_selector("#owners:not([hidden])")
    assert page.locator("#owner-shares tr").all_inner_texts() == ["ann\t6\t75 %\t", "bob\t2\t25 %\t"]
    opened.problems = [problem for problem in opened.problems if "401" not in problem and "403" not in problem]
    opened.check()


def test_the_engine_of_the_chosen_model_is_shown(visit: Any) -> None:
    opened = visit(InProcessEngine(views=[VIEW]), {"served_model_name": "one,two"})
    page = opened.page
    page.wait_for_selector("#cache[aria-label*='by 1 requests']")
    with page.expect_request("**/stats/live?model=two"):
        page.select_option("#model", "two")
    page.wait_for_selector("#state:text('idle')")
    opened.check()


def test_the_cache_is_shown_as_it_was(visit: Any) -> None:
    engine = InProcessEngine(views=[VIEW])
    opened = visit(engine)
    page = opened.page
    page.wait_for_selector("#cache[aria-label*='by 1 requests']")
    engine.views = [CacheView(1, [FREE, 64], [], False, 0.0)]
    page.wait_for_selector("#cache[aria-label*='by 0 requests']")
    page.focus("#cache-time")
    page.keyboard.press("Home")
    page.wait_for_selector("#cache[aria-label*='by 1 requests']")
    assert "s ago" in page.inner_text("#cache-text")
    opened.check()


def test_the_time_of_a_request_is_drawn(visit: Any) -> None:
    engine = InProcessEngine()
    events = [
        Event(7, "arrived", 1.0, 0, 0, tokens=20),
        Event(7, "admitted", 1.1, 0, 0),
        Event(7, "chunk", 1.2, 1, 1, tokens=20),
        Event(7, "preempted", 1.3, 2, 2, tokens=21, by=8),
        Event(7, "admitted", 1.4, 2, 2),
        Event(7, "ended", 2.0, 9, 9, tokens=6, reason="stop", drafts=4, accepted=3),
    ]
    engine.timelines.add(events)
    opened = visit(engine)
    page = opened.page
    page.fill("#explain-id", "7")
    page.click("#explain >> text=Show")
    page.wait_for_selector(".drawing")
    kinds = page.locator(".drawing rect").evaluate_all("all => all.map((each) => each.getAttribute('class'))")
    assert kinds == ["waiting", "prefill", "decode", "waiting", "decode"]
    assert page.locator(".drawing text.right, .drawing text.left").all_text_contents()[:2] == ["preempted", "ended"]
    assert "3 of 4 drafts accepted" in page.inner_text("#timeline")
    opened.check()
