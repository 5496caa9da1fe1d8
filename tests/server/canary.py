"""Somebody else's streams, one after the other, while a server is attacked: each must be what it is alone."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

BODY = {
    "prompt": "canary",
    "max_tokens": 60,
    "seed": 7,
    "temperature": 0.9,
    "ignore_eos": True,
    "logprobs": 3,
    "stream": True,
}
"""Drawn tokens with log-probabilities: neighbours that change the least of it show."""

Answer = tuple[str, str, str]
"""Text, log-probabilities as JSON, and the reason to finish."""


class Canary:
    """Streams until it is stopped; ``strange`` has what differed from the stream alone."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.slowest_gap = 0.0
        """Most seconds between two pieces."""
        self.count = 0
        self.strange: list[Any] = []
        self._is_over = False
        self.alone = self._stream()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            try:
                began = time.monotonic()
                answer = self._stream()
                time.sleep(time.monotonic() - began)  # it shall not be most of what the server does
                if answer != self.alone:
                    self.strange.append(answer)
            except Exception as error:  # whatever a client may see
                self.strange.append(error)
            self.count += 1

    def _stream(self) -> Answer:
        texts, reports, reason = [], dict[str, list[Any]](), ""
        with (
            httpx.Client(base_url=self._url, timeout=60, verify=False) as client,
            client.stream("POST", "/v1/completions", json=BODY) as stream,
        ):
            last = time.monotonic()
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                self.slowest_gap, last = max(self.slowest_gap, now - last), now
                (choice,) = json.loads(line[6:])["choices"]
                texts.append(choice["text"])
                reason = choice["finish_reason"] or reason
                for name, values in (choice["logprobs"] or {}).items():
                    reports.setdefault(name, []).extend(values)
        return "".join(texts), json.dumps(reports), reason

    def stop(self, least: int = 0) -> None:
        """End when there were ``least`` streams, or a minute later."""
        deadline = time.monotonic() + 60
        while self.count < least and time.monotonic() < deadline:
            time.sleep(0.01)
        self._is_over = True
        self._thread.join(60)
