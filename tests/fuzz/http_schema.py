"""Requests that schemathesis makes from the server's own OpenAPI document, valid and invalid: no answer is a 5xx.

``python -m tests.fuzz.http_schema FOLDER EXAMPLES`` prints the number of requests; findings are as in ``worker``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.fuzz.http_requests import HTTPRequests
from tests.fuzz.http_server import ENDLESS, READ_SECONDS


class Schema(HTTPRequests):
    """The server of ``http_requests``, asked by schemathesis."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder_of_findings = folder
        self._known: set[str] = set()
        self.num_requests = 0

    def run(self, examples: int) -> None:
        """Ask each operation ``examples`` times with valid requests, and as often with invalid ones."""
        document = schemathesis.openapi.from_url(f"{self._server.url}/openapi.json")
        for result in document.get_all_operations():
            operation = result.ok()
            for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
                with contextlib.suppress(Unsatisfiable):  # such as an invalid request of what takes everything
                    self._ask_operation(operation, mode, examples)

    def _ask_operation(self, operation: Any, mode: GenerationMode, examples: int) -> None:
        @seed(0)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            self._ask_case(case)

        ask()

    def _ask_case(self, case: Any) -> None:
        self.num_requests += 1
        given: dict[str, Any] = {}
        if ENDLESS in case.operation.path:
            given["stream"] = True
        response = case.call(timeout=READ_SECONDS, **given)
        place = f"{response.status_code} {case.method} {case.operation.path}"
        is_fault = response.status_code >= 500 and "retry-after" not in response.headers
        if not (is_fault or self._errors.found) or place in self._known:
            return
        self._known.add(place)
        details = "\n".join([case.as_curl_command(), *self._errors.found])
        self._errors.found = []
        with (self._folder_of_findings / "findings.jsonl").open("a") as lines:
            lines.write(json.dumps({"target": "http_schema", "place": place, "input": "", "details": details}) + "\n")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    schema = Schema(folder)
    try:
        schema.run(int(sys.argv[2]))
    finally:
        schema.close()
    print(schema.num_requests)


if __name__ == "__main__":
    main()
