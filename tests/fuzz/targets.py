"""The targets of fuzzing, by name."""

from __future__ import annotations

import importlib

from tests.fuzz.target import Target

FILES = ("gguf", "safetensors", "model_config", "tokenizer", "sentencepiece", "journal", "names")
PROGRAMS = ("template", "grammar")
MESSAGES = ("tool_calls",)
HTTP = ("http_requests", "http_several_models", "http_bytes", "histories")
SERVERS = ("proxy", "grpc_worker", "kv_events")
NAMES = (*FILES, *PROGRAMS, *MESSAGES, *HTTP, *SERVERS)


def load(name: str) -> Target:
    """The target of module ``tests.fuzz.NAME``, ready to read."""
    target: Target = importlib.import_module(f"tests.fuzz.{name}").make()
    return target
