"""LiteLLM: a picture in OpenAI's words, for three kinds of servers. Arguments: URL, model, file."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import litellm

URL, MODEL, FILE = sys.argv[1:]
DATA = "data:image/png;base64," + base64.b64encode(Path(FILE).read_bytes()).decode()

parts: list[Any] = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": DATA}}]
for provider, base in (("openai", URL + "/v1"), ("hosted_vllm", URL + "/v1"), ("anthropic", URL)):
    answer = litellm.completion(
        model=f"{provider}/{MODEL}",
        api_base=base,
        api_key="none",
        messages=[{"role": "user", "content": parts}],
        max_tokens=10,
        num_retries=0,
    )
    assert answer.choices[0].message.content, provider
