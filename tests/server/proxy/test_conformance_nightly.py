"""The other tests of the OpenAI API, through a proxy in front of the server that they are written for."""

from __future__ import annotations

import pytest

from tests.server.openai import (
    test_best_of,
    test_completions,
    test_every_field,
    test_passed_over,
    test_restrictions,
    test_sampling_defaults,
    test_structured,
    test_tools,
    test_vectors,
)
from tests.server.proxy.test_conformance import every_test, serve_app, served  # noqa: F401 (fixtures)

pytestmark = pytest.mark.nightly

globals().update(
    every_test(
        test_best_of,
        test_completions,
        test_every_field,
        test_passed_over,
        test_restrictions,
        test_sampling_defaults,
        test_structured,
        test_tools,
        test_vectors,
    )
)
