"""The openai package: a picture in a chat, whole and streamed, and in a response. Arguments: URL, model, file."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import openai

URL, MODEL, FILE = sys.argv[1:]
CLIENT = openai.OpenAI(base_url=URL + "/v1", api_key="none", max_retries=0)
DATA = "data:image/png;base64," + base64.b64encode(Path(FILE).read_bytes()).decode()

parts: list[Any] = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": DATA}}]
chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 10}
text = CLIENT.chat.completions.create(**chat).choices[0].message.content
assert text
chunks = CLIENT.chat.completions.create(**chat, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
asked: list[Any] = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": DATA}]
response = CLIENT.responses.create(
    model=MODEL, input=[{"role": "user", "content": asked}], max_output_tokens=16, store=False
)
assert response.output_text
