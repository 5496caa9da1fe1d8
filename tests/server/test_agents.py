"""What coding agents send in their last turn of several with tools: docs/clients.md says which versions.

Recorded from the programs, with every text replaced and two tools of each kind left; `make test-clients` runs them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("agent_requests.json").read_text())
PASSED_OVER = {
    "claude": ["output_config.effort", "thinking"],
    "codex": ["tools.web_search"],
    "codex_custom": ["reasoning.effort", "text.verbosity"],
    "opencode": [],
    "gptme": [],
    "aider": [],
    "gemini": ["generationConfig.thinkingConfig"],
}
ENDS = {
    "claude": "event: message_stop",
    **dict.fromkeys(("codex", "codex_custom"), "event: response.completed"),
    "gemini": '"finishReason":"STOP"',
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = InProcessEngine(lambda request: [*b"Yes", IM_END], max_model_len=1 << 16)
    served = Served(engine, byte_tokenizer(), {"served_model_name": "smollm2-135m", "accept_any_model": True})
    yield served
    served.stop()


@pytest.mark.parametrize("agent", RECORDED)
def test_the_last_request_of_an_agent(server: Served, agent: str) -> None:
    sent = RECORDED[agent]
    answer = server.client.post(sent["path"], json=sent["body"], headers=sent["headers"])
    assert answer.status_code == 200, answer.text
    named = [name for name in answer.headers.get("x-octavo-unknown-fields", "").split(", ") if name]
    assert named == PASSED_OVER[agent]
    assert ENDS.get(agent, "data: [DONE]") in answer.text
