"""The public names of ``octavo``, and that importing it is fast."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo
from octavo import errors


def test_all_public_names_exist_and_are_the_ones_meant() -> None:
    assert octavo.__all__ == sorted(octavo.__all__, key=lambda name: (name != "LLM", name[0] == "_", name))
    assert all(getattr(octavo, name) is not None for name in octavo.__all__)
    assert set(dir(octavo)) == set(octavo.__all__)
    raised = {name for name, value in vars(errors).items() if isinstance(value, type)}
    outputs = {
        "RequestOutput",
        "CompletionOutput",
        "Logprob",
        "RequestMetrics",
        "ClassificationRequestOutput",
        "EmbeddingRequestOutput",
        "PoolingRequestOutput",
        "ScoringRequestOutput",
    }
    steps = {"Engine", "StepResult", "Computed", "EngineMetrics", "Percentiles"}
    beams = {"BeamSearchParams", "BeamSearchOutput", "BeamSearchSequence"}
    clients = {"Client", "AsyncClient", "Choice", "Completion", "Piece"}
    others = {
        "LLM",
        "SamplingParams",
        "RepetitionDetectionParams",
        "StructuredOutputsParams",
        "LoRARequest",
        "EngineConfig",
        "__version__",
        *outputs,
        *steps,
        *beams,
        *clients,
    }
    assert set(octavo.__all__) == raised | others


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(octavo, "LLMM")


def test_names_of_vllm_are_explained() -> None:
    with pytest.raises(AttributeError, match=r"LLM\.stream and Engine\.step run in this process"):
        _ = octavo.AsyncLLM  # type: ignore[attr-defined]


def test_the_version_is_the_packages() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert octavo.__version__ == project["project"]["version"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, octavo; print([m for m in ('torch', 'numba', 'tokenizers', 'rich', 'httpx') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
