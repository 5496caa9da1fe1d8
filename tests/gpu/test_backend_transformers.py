"""The backend transformers on a CUDA device: its graphs and kernels next to the library on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo_fleet.transformers.own_cache import OwnCacheTransformer
from tests.backends.checkpoints import OWN, PAGED, save_checkpoint
from tests.gpu.test_families import GREEDY, SETTINGS, check_alike
from tests.models.test_architectures import PROMPTS as LONGER

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [prompt[:200] for prompt in LONGER]
SERVED: dict[str, Any] = {**SETTINGS, "backend": "transformers"}


def generate(folder: Path, device: str) -> tuple[list[Any], Any]:
    with LLM(folder, **{**SERVED, "device": device}) as llm:
        executor: Any = llm.engine.runner.executor  # type: ignore[attr-defined]
        return [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS[2:], GREEDY)], executor


@pytest.mark.parametrize("family", [*PAGED, *OWN])
def test_logprobs_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    save_checkpoint(family, tmp_path)
    (expected, _), (found, executor) = generate(tmp_path, "cpu"), generate(tmp_path, "cuda")
    check_alike(expected, found)
    if family in ("smollm3", "stablelm", "granite"):
        assert not isinstance(executor._model, OwnCacheTransformer)
        assert executor._graphs is not None
