"""The engine in this process: ``LLM(...).generate(prompts, params)``, with results in vLLM's shape."""

from octavo.llm.llm import LLM
from octavo.llm.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput"]
