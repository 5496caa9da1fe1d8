"""The console in a headless Chromium, on the path or by `playwright install`; with what a page must never do.

With ``OCTAVO_AXE``, the path of axe-core's ``axe.min.js``, accessibility is checked, too.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.text.tokenizer import Tokenizer
from octavo.types import Request
from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE = {"viewport": {"width": 390, "height": 780}, "has_touch": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        try:
            found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error}")
        yield found
        found.close()


def says(*texts: str) -> Callable[[Request], list[int]]:
    """For an engine: the texts as answers, one after another, and the last one from then on."""
    places = dict[int, int]()

    def answer(request: Request) -> list[int]:
        place = places.setdefault(request.id, min(len(places), len(texts) - 1))
        return [*texts[place].encode(), IM_END]

    return answer


class Visit:
    """A page of a server, and what must not happen on it."""

    def __init__(self, browser: Any, served: Served, **options: Any) -> None:
        self.served = served
        self.is_stopped = False
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(5_000)
        self.problems: list[str] = []
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("dialog", lambda dialog: self.problems.append(dialog.message))
        self.page.on("request", self._on_request)
        self.page.goto(served.url)
        self.page.wait_for_selector("#model option", state="attached")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.served.url, "data:", "blob:")):
            self.problems.append(f"request to {request.url}")

    def say(self, text: str) -> None:
        self.page.fill("#prompt", text)
        self.page.click("#send")

    def ask(self, text: str, number: int = 1) -> dict[str, Any]:
        """Send a message and wait for the answer, the page's ``number``-th; returns the body that was sent."""
        with self.page.expect_request("**/v1/chat/completions") as sent:
            self.say(text)
        self.answered(number)
        body: dict[str, Any] = sent.value.post_data_json
        return body

    def answered(self, number: int = 1) -> None:
        self.page.locator(".message.assistant .actions").nth(number - 1).wait_for()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.page.wait_for_timeout(10)  # runs the browser's events, unlike sleep

    def close(self) -> None:
        self.context.close()
        if not self.is_stopped:
            self.served.stop()

    def stop_server(self) -> None:
        self.is_stopped = True
        self.served.stop()

    def check(self) -> None:
        if axe := os.environ.get("OCTAVO_AXE"):
            self.page.evaluate(Path(axe).read_text())
            found = self.page.evaluate("axe.run(document)")["violations"]
            assert not found, [(each["id"], [node["html"] for node in each["nodes"]]) for each in found]
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert not self.problems


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Visit]]:
    """Open the console of a server with an engine, and settings as keyword arguments."""
    visits: list[Visit] = []

    def open_page(
        engine: InProcessEngine,
        settings: dict[str, Any] | None = None,
        tokenizer: Tokenizer | None = None,
        **options: Any,
    ) -> Visit:
        visits.append(Visit(browser, Served(engine, tokenizer or byte_tokenizer(), settings or {}), **options))
        return visits[-1]

    yield open_page
    for each in visits:
        each.close()
