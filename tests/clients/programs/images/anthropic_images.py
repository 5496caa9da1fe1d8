"""The anthropic package: a picture in a message, whole and streamed. Arguments: URL, model, file."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import anthropic

URL, MODEL, FILE = sys.argv[1:]
CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
SOURCE = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(Path(FILE).read_bytes()).decode()}

blocks: list[Any] = [{"type": "image", "source": SOURCE}, {"type": "text", "text": "What is it?"}]
message: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": blocks}], "max_tokens": 10}
whole = CLIENT.messages.create(**message)
text = whole.content[0].text
assert text
with CLIENT.messages.stream(**message) as stream:
    assert stream.get_final_text() == text
counted = CLIENT.messages.count_tokens(model=MODEL, messages=message["messages"]).input_tokens
assert counted == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
