"""The console in Chromium: the frame of the page and the live view of the engine. `make test-browser`."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.telemetry.cache_view import CACHED, FREE, SHARED, CacheView, PrefixView
from tests.server.console.conftest import PHONE, says
from tests.server.in_process import InProcessEngine

MOST_BYTES = 250_000
"""That a page with formulas loads, but for their fonts."""
FORMULA = "$$\\frac{1}{2}$$"
VIEW = CacheView(1, [1, 3, SHARED, 1, CACHED, 2, FREE, 58], [PrefixView(-1, 3, 1), PrefixView(0, 1, 0)], False, 0.0)


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
