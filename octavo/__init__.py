"""Octavo: an LLM inference engine. ``LLM`` and ``Engine`` run it in this process, ``octavo serve`` over HTTP.

Importing this package is fast: torch is loaded on the first use of ``LLM``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import (
    AuthenticationError,
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidParameter,
    ModelNotFound,
    OctavoError,
    QueueFull,
    RanksLost,
    RequestError,
    RequestFailed,
    RequestTooLarge,
    RunnerError,
    Unavailable,
    WorkerLost,
)
from octavo.sampling_params import RepetitionDetectionParams, SamplingParams

if TYPE_CHECKING:
    from octavo.client import AsyncClient, Choice, Client, Completion, Piece
    from octavo.llm import (
        LLM,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        CompletionOutput,
        Computed,
        EmbeddingRequestOutput,
        Engine,
        EngineMetrics,
        Logprob,
        Percentiles,
        RequestMetrics,
        RequestOutput,
        ScoringRequestOutput,
        StepResult,
    )

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncClient",
    "AuthenticationError",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CheckpointError",
    "Choice",
    "Client",
    "Completion",
    "CompletionOutput",
    "Computed",
    "ConfigError",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineConfig",
    "EngineMetrics",
    "InvalidParameter",
    "Logprob",
    "ModelNotFound",
    "OctavoError",
    "Percentiles",
    "Piece",
    "QueueFull",
    "RanksLost",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestFailed",
    "RequestMetrics",
    "RequestOutput",
    "RequestTooLarge",
    "RunnerError",
    "SamplingParams",
    "ScoringRequestOutput",
    "StepResult",
    "Unavailable",
    "WorkerLost",
    "__version__",
]

_FROM_LLM = {
    *("LLM", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
    *("EmbeddingRequestOutput", "ScoringRequestOutput"),
    *("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
    *("Engine", "Computed", "EngineMetrics", "Percentiles", "StepResult"),
}
_FROM_CLIENT = {"AsyncClient", "Choice", "Client", "Completion", "Piece"}


def __getattr__(name: str) -> Any:
    """Import the names that need the engine, or an HTTP client, on first access (PEP 562)."""
    if name in _FROM_CLIENT:
        from octavo import client

        return getattr(client, name)
    if name not in _FROM_LLM:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from octavo import llm

    return getattr(llm, name)


def __dir__() -> list[str]:
    return __all__
