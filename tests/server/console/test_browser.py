"""The console in a headless Chromium: `make test-browser`, with Chromium on the path or by `playwright install`.

Skipped without them. With ``OCTAVO_AXE``, the path of axe-core's ``axe.min.js``, accessibility is checked, too.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.telemetry.cache_view import CACHED, FREE, SHARED, CacheView, PrefixView
from octavo.types import Request
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = {"width": 390, "height": 780}
MOST_BYTES = 300_000
HOSTILE = "<img src=x onerror=alert(1)>\n```\n<b>code</b>\n```\n- one\n- **two**\n"
NUM_TOKENS = len(HOSTILE)
VIEW = CacheView(1, [1, 3, SHARED, 1, CACHED, 2, FREE, 58], [PrefixView(-1, 3, 1), PrefixView(0, 1, 0)], False, 0.0)


def answer(request: Request) -> list[int]:
    return list(HOSTILE.encode())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield found
        found.close()


class Visit:
    """A page of a server, and what must not happen on it."""

    def __init__(self, browser: Any, served: Served, **options: Any) -> None:
        self.served = served
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(5_000)
        self.problems: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", self._on_request)
        self.page.goto(served.url)
        self.page.locator("#max_tokens").evaluate(
            "(node, value) => { node.value = value }", NUM_TOKENS
        )  # the engine's context is short

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith(self.served.url):
            self.problems.append(f"request to {request.url}")

    def say(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.keyboard.press("Enter")

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.page.wait_for_timeout(10)  # runs the browser's events, unlike sleep

    def check(self) -> None:
        if axe := os.environ.get("OCTAVO_AXE"):
            self.page.evaluate(Path(axe).read_text())
            found = self.page.evaluate("axe.run(document)")["violations"]
            assert not found, [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
        assert not self.problems


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open the console of a server with an engine, and settings as keyword arguments."""
    visits: list[Visit] = []

    def open_page(engine: InProcessEngine, settings: dict[str, Any] | None = None, **options: Any) -> Visit:
        visits.append(Visit(browser, Served(engine, byte_tokenizer(), settings or {}), **options))
        return visits[-1]

    yield open_page
    for each in visits:
        each.context.close()
        each.served.stop()


def test_a_chat_shows_markdown_and_no_html(visit: Any) -> None:
    opened = visit(InProcessEngine(answer))
    page = opened.page
    opened.say("Hi")
    page.wait_for_selector(".message.assistant .about")
    assert page.locator(".message.assistant img").count() == 0
    assert page.inner_text(".message.assistant pre").strip() == "<b>code</b>"
    assert page.locator(".message.assistant li").all_inner_texts() == ["one", "two"]
    assert page.inner_text(".message.assistant strong") == "two"
    assert f"+ {NUM_TOKENS} tokens" in page.inner_text(".about")
    opened.check()


def test_an_answer_can_be_stopped_and_a_new_chat_is_empty(visit: Any) -> None:
    engine = InProcessEngine(runs=False)
    opened = visit(engine)
    page = opened.page
    for number, button in enumerate(("#stop", "#reset"), 1):
        opened.say("Tell me a story.")
        page.wait_for_selector("#stop")
        opened.until(lambda: engine.num_live >= 1)
        for _ in range(3):
            opened.served.call(engine.step)
        page.wait_for_selector(".message.assistant p")
        page.click(button)
        page.wait_for_selector("#send")
        opened.until(lambda number=number: len(engine.aborted) >= number)
    assert page.locator(".message").count() == 0
    opened.say("Again")
    opened.until(lambda: engine.num_live >= 1)
    assert b"story" not in bytes(token for token in engine.requests[-1].prompt_tokens if token < 256)
    opened.check()


def test_a_schema_is_sent_and_a_bad_one_is_named(visit: Any) -> None:
    engine = InProcessEngine()
    opened = visit(engine)
    page = opened.page
    page.locator("#composer summary").click()
    page.fill("#schema", "{")
    opened.say("Hi")
    assert "JSON schema" in page.inner_text(".message.error")
    page.fill("#schema", json.dumps({"type": "object"}))
    with page.expect_request("**/v1/chat/completions") as sent:
        opened.say("Hi")
    assert sent.value.post_data_json["response_format"]["json_schema"]["schema"] == {"type": "object"}
    page.wait_for_selector(".message.assistant .about")
    assert engine.requests[-1].params.grammar is not None
    opened.check()


@pytest.mark.parametrize(("scheme", "size"), [("light", None), ("dark", PHONE)])
def test_a_burst_is_seen_in_the_live_view(visit: Any, scheme: str, size: dict[str, int] | None) -> None:
    engine = InProcessEngine(runs=False, views=[VIEW])
    opened = visit(engine, color_scheme=scheme, reduced_motion="reduce", **({"viewport": size} if size else {}))
    page = opened.page
    if size:
        page.locator("[data-panel=engine]").click()
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
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    opened.check()


def test_a_phone_shows_one_panel_at_a_time(visit: Any) -> None:
    opened = visit(InProcessEngine(), viewport=PHONE)
    page = opened.page
    for panel, other in (("chat", "engine"), ("engine", "chat")):
        page.locator(f"[data-panel={panel}]").click()
        assert page.is_visible(f"#{panel}")
        assert not page.is_visible(f"#{other}")
    opened.check()


def test_what_the_page_loads_is_small(visit: Any) -> None:
    opened = visit(InProcessEngine())
    sizes = opened.page.evaluate("performance.getEntries().map((entry) => entry.encodedBodySize ?? 0)")
    assert 10_000 < sum(sizes) < MOST_BYTES
    opened.check()


def test_the_page_asks_for_the_key_and_sends_it(visit: Any) -> None:
    opened = visit(InProcessEngine(), {"api_key": "own"})
    page = opened.page
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "own")
    page.keyboard.press("Enter")
    page.wait_for_selector("#model option[value=test]", state="attached")
    opened.say("Hi")
    page.wait_for_selector(".message.assistant .about")
    page.goto(f"{opened.served.url}/docs")
    page.wait_for_selector(".operation")
    opened.problems = [problem for problem in opened.problems if "401" not in problem]
    opened.check()
