"""Valid sequences of requests, from which ``http_requests`` makes others."""

from __future__ import annotations

import json
from typing import Any

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}
FORM = "multipart/form-data; boundary=XX"
ITEMS = [{"role": "user", "content": "Hi"}, {"type": "function_call_output", "call_id": "c", "output": "4"}]


def post(path: str, body: Any = None, **headers: str) -> dict[str, Any]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"method": "POST", "path": path, "headers": {"content-type": "application/json", **names}, "body": body}


def get(path: str, **headers: str) -> dict[str, Any]:
    return {"path": path, "headers": {name.replace("_", "-"): value for name, value in headers.items()}}


def delete(path: str) -> dict[str, Any]:
    return {"method": "DELETE", "path": path}


def part(name: str, content: str, file: str = "") -> str:
    return f'--XX\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n{content}\r\n'


UPLOAD = part("purpose", "batch") + part("file", json.dumps(LINE) + "\n", '; filename="a.jsonl"') + "--XX--\r\n"
SOUND = part("language", "en") + part("temperature", "0.5") + part("file", "RIFF", '; filename="a.wav"') + "--XX--\r\n"
STREAMED = {"prompt": "Hi", "n": 2, "max_tokens": 6, "stream": True}
STREAMED_CHAT = {"messages": MESSAGES, "max_tokens": 6, "stream": True}
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "maxLength": "9"}}, "propertyOrdering": ["a"]}
GEMINI = {
    "contents": [{"role": "user", "parts": [{"text": "Hi"}, {"functionResponse": {"response": {"output": "4"}}}]}],
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "tools": [{"functionDeclarations": [{"name": "f", "parameters": SCHEMA}]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "generationConfig": {"maxOutputTokens": 4, "responseSchema": SCHEMA, "thinkingConfig": {"thinkingBudget": 2}},
}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
KEPT = {"idempotency_key": "k{once}"}

SEEDS: list[list[dict[str, Any]]] = [
    [post("/v1/completions", {"model": "test", "prompt": ["Hi", "Ho"], "max_tokens": 3, "logprobs": 2, "n": 2})],
    [post("/v1/completions", {"prompt": [[1, 2, 3]], "max_tokens": 3, "stream": True, "echo": True, "seed": 1})],
    [post("/v1/completions", {"prompt": "Hi", "use_beam_search": True, "n": 2, "max_tokens": 3})],
    [post("/v1/completions", {"prompt": "Hi", "stop": ["a"], "logit_bias": {"5": 1.0}, "min_p": 0.1, "timeout": 5})],
    [
        post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40, "tools": TOOLS}),
        post(
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_tokens": 4, "stream": True, "logprobs": True, "top_logprobs": 2},
        ),
    ],
    [
        post("/v1beta/models/test:generateContent", GEMINI),
        post("/v1beta/models/test:streamGenerateContent?alt=sse", GEMINI),
        post("/v1beta/models/test:countTokens", GEMINI),
    ],
    [post("/v1/chat/completions", {"messages": MESSAGES, "guided_choice": ["yes", "no"], "max_completion_tokens": 4})],
    [
        post("/v1/chat/completions", STREAMED_CHAT, **KEPT),
        post("/v1/chat/completions", STREAMED_CHAT, **KEPT, last_event_id="{event}"),
    ],
    [
        post("/v1/completions", STREAMED, **KEPT),
        post("/v1/completions", STREAMED, **KEPT, last_event_id="{event}"),
    ],
    [
        post("/v1/responses", {"input": "Hi", "max_output_tokens": 4, "stream": True, "background": True}),
        get("/v1/responses/{resp}?stream=true&starting_after=2"),
        get("/v1/responses/{resp}/input_items?limit=2&order=asc&after={msg}"),
        post("/v1/responses/{resp}/cancel"),
        post("/v1/responses", {"input": ITEMS[:1], "previous_response_id": "{resp}", "max_output_tokens": 2}),
        delete("/v1/responses/{resp}"),
    ],
    [
        post("/v1/conversations", {"items": ITEMS[:1], "metadata": {"a": "b"}}),
        post("/v1/conversations/{conv}/items", {"items": ITEMS}),
        get("/v1/conversations/{conv}/items?limit=2&order=asc&after={msg}"),
        get("/v1/conversations/{conv}/items/{msg}"),
        post("/v1/responses", {"conversation": {"id": "{conv}"}, "input": "Hi", "max_output_tokens": 2}),
        post("/v1/conversations/{conv}", {"metadata": {"c": "d"}}),
        delete("/v1/conversations/{conv}/items/{msg}"),
        delete("/v1/conversations/{conv}"),
    ],
    [
        post("/v1/files", UPLOAD, content_type=FORM),
        post("/v1/batches", {"input_file_id": "{file}", "endpoint": "/v1/completions", "completion_window": "24h"}),
        get("/v1/batches/{batch}"),
        get("/v1/files/{file}/content"),
        post("/v1/batches/{batch}/cancel"),
        get("/v1/files?limit=2&after={file}&order=asc&purpose=batch"),
        delete("/v1/files/{file}"),
    ],
    [post("/v1/audio/transcriptions", SOUND, content_type=FORM)],
    [post("/sleep?level=1&mode=wait&model=test"), get("/is_sleeping?model=test"), post("/wake_up?model=test")],
    [post("/v1/messages", {"model": "other", "messages": MESSAGES[1:], "max_tokens": 3, "stream": True})],
    [post("/v1/messages/count_tokens", {"messages": MESSAGES[1:], "tools": [{"name": "f", "input_schema": {}}]})],
    [post("/api/chat", {"model": "test", "messages": MESSAGES[:1], "options": {"num_predict": 2}})],
    [post("/api/generate", {"model": "test", "prompt": "Hi", "format": "json", "options": {"num_predict": 2}})],
    [post("/", {"inputs": "Hi", "parameters": {"max_new_tokens": 2, "details": True}, "stream": False})],
    [post("/generate", {"prompt": "Hi", "max_tokens": 2})],
    [post("/generate_stream", {"inputs": "Hi", "parameters": {}})],
    [post("/infer/v1/completions", {"model": "test", "prompt": "Hi", "max_tokens": 2})],
    [post("/tokenize", {"prompt": "Hi"}), post("/detokenize", {"tokens": [1, 2]}), get("/tokenizer_info")],
    [post("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 2})],
    [post("/v1/score", {"text_1": "a", "text_2": ["b"]}), post("/v1/rerank", {"query": "a", "documents": ["b", "c"]})],
    [post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"})],
    [get("/v1/models"), get("/v1/models/owner/name:Q4_K_M"), get("/v1/models/test"), get("/api/tags"), get("/docs")],
    [get("/v1/kv_events?since=0"), get("/stats", traceparent=TRACE)],
    [get("/health?fail_after=5"), get("/metrics"), get("/load")],
    [get("/v1/requests/cmpl-1/timeline"), get("/admin/keys"), post("/admin/keys/reload")],
]
