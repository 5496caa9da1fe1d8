"""The engine in this process: ``LLM(...).generate(prompts, params)``, with results in vLLM's shape."""

from octavo.llm.llm import LLM
from octavo.llm.metrics import RequestMetrics
from octavo.llm.outputs import (
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringRequestOutput,
)

__all__ = [
    "LLM",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "ScoringRequestOutput",
]
