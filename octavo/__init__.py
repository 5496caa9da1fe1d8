"""Octavo: an LLM inference engine. ``LLM`` and ``Engine`` run it in this process, ``octavo serve`` over HTTP.

Importing this package is fast: torch is loaded on the first use of ``LLM``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    Withdrawn,
    WorkerLost,
)

if TYPE_CHECKING:
    from octavo.client import AsyncClient, Choice, Client, Completion, Piece
    from octavo.config import EngineConfig
    from octavo.llm import (
        LLM,
        BeamSearchOutput,
        BeamSearchParams,
        BeamSearchSequence,
        ClassificationRequestOutput,
        CompletionOutput,
        Computed,
        EmbeddingRequestOutput,
        Engine,
        EngineMetrics,
        Logprob,
        Percentiles,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringRequestOutput,
        StepResult,
    )
    from octavo.llm.vllm_arguments import LoRARequest
    from octavo.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

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
    "ClassificationRequestOutput",
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
    "LoRARequest",
    "Logprob",
    "ModelNotFound",
    "OctavoError",
    "Percentiles",
    "Piece",
    "PoolingRequestOutput",
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
    "StructuredOutputsParams",
    "Unavailable",
    "Withdrawn",
    "WorkerLost",
    "__version__",
]

_MODULES = {
    "octavo.client": ("AsyncClient", "Choice", "Client", "Completion", "Piece"),
    "octavo.config": ("EngineConfig",),
    "octavo.llm": (
        *("LLM", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"),
        *("ClassificationRequestOutput", "EmbeddingRequestOutput", "PoolingRequestOutput", "ScoringRequestOutput"),
        *("BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence"),
        *("Engine", "Computed", "EngineMetrics", "Percentiles", "StepResult"),
    ),
    "octavo.llm.vllm_arguments": ("LoRARequest",),
    "octavo.sampling_params": ("RepetitionDetectionParams", "SamplingParams", "StructuredOutputsParams"),
}
"""Where the names come from that are imported on first access: processes that need few of them start often."""
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
_ASYNC = "AsyncClient is for a server, which `octavo serve` starts; LLM.stream and Engine.step run in this process"
_OF_VLLM = {
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), _ASYNC),
    **dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), "LLM and Engine take the settings by name; see EngineConfig"),
    "LLMEngine": "Engine is added to and run step by step",
    **dict.fromkeys(("TextPrompt", "TokensPrompt"), "a prompt is text, a list of token ids, or a dict of either"),
    "GuidedDecodingParams": "SamplingParams has structured_outputs=StructuredOutputsParams(...)",
    "PoolingParams": "LLM.embed, classify, encode, score and reward take what they need by name",
}
"""What to use in place of public names of vLLM."""


def __getattr__(name: str) -> Any:
    """Import what a name needs on first access (PEP 562)."""
    if name not in _PLACES:
        instead = f"; {_OF_VLLM[name]}" if name in _OF_VLLM else ""
        raise AttributeError(f"module 'octavo' has no attribute {name!r}{instead}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return __all__
