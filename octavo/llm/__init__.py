"""The engine in this process: ``LLM(...).generate(prompts, params)``, with results in vLLM's shape."""

from octavo.engine.beam_search import BeamSearchParams, BeamSearchSequence
from octavo.llm.beam_search import BeamSearchOutput
from octavo.llm.engine_metrics import EngineMetrics, Percentiles
from octavo.llm.llm import LLM
from octavo.llm.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
    ScoringRequestOutput,
)
from octavo.llm.stepwise_engine import Computed, Engine, StepResult

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "Computed",
    "EmbeddingRequestOutput",
    "Engine",
    "EngineMetrics",
    "Logprob",
    "Percentiles",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "ScoringRequestOutput",
    "StepResult",
]
