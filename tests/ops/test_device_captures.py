"""Captures and waits for the device, with a graph that is none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from octavo.ops.device_captures import captured, wait_for_device


def test_a_wait_for_the_device_waits_for_captures_and_captures_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()

    class Graph:
        def capture_begin(self, **options: Any) -> None:
            order.append("begin")

        def capture_end(self) -> None:
            order.append("end")

    def capture() -> None:
        with captured(Graph()):  # type: ignore[arg-type]
            pass

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("wait"))
    others = [threading.Thread(target=work) for work in (wait_for_device, capture)]
    with captured(Graph()):  # type: ignore[arg-type]
        for other in others:
            other.start()
            other.join(0.05)
            assert other.is_alive()
    for other in others:
        other.join(30)
    assert order[:2] == ["begin", "end"]
    assert "".join(order[2:]) in ("waitbeginend", "beginendwait")
