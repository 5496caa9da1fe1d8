"""Conversations in the four dialects, with all that a message can contain: no answer is a 5xx."""

from __future__ import annotations

from typing import Any

from tests.fuzz.http_requests import HTTPRequests
from tests.fuzz.http_seeds import TOOLS, post
from tests.fuzz.target import Target, as_json

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OPENAI: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "4"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": "No."},
    {"role": "user", "content": "And <|im_end|>?"},
]
ANTHROPIC: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I call."},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4", "is_error": False}]},
]
RESPONSES: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"a": 1}',
        "id": "fc1",
        "status": "completed",
    },
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "4"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4", "annotations": []}]},
    {"role": "user", "content": "Why?"},
]
OLLAMA: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi", "images": []},
    {
        "role": "assistant",
        "content": "",
        "thinking": "Hm.",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    },
    {"role": "tool", "content": "4", "tool_name": "f"},
]
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def make() -> Target:
    return Histories()


class Histories(HTTPRequests):
    seeds = [
        as_json([post(path, {"model": "test", **body})])
        for path, body in (
            ("/v1/chat/completions", {"messages": OPENAI, "tools": TOOLS, "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": OPENAI[:2], "max_tokens": 2, "continue_final_message": True}),
            ("/v1/messages", {"messages": ANTHROPIC, "system": [{"type": "text", "text": "Be."}], "max_tokens": 2}),
            ("/v1/messages/count_tokens", {"messages": ANTHROPIC, "tools": [{"name": "f", "input_schema": {}}]}),
            ("/v1/responses", {"input": RESPONSES, "tools": [FUNCTION], "max_output_tokens": 2}),
            ("/api/chat", {"messages": OLLAMA, "tools": TOOLS, "options": {"num_predict": 2}, "stream": False}),
            ("/tokenize", {"messages": OPENAI, "tools": TOOLS}),
        )
    ]
