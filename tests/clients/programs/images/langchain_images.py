"""LangChain: its standard block of a picture, over OpenAI's chat and responses and Anthropic's messages.

Arguments: URL, model, file.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

URL, MODEL, FILE = sys.argv[1:]
PICTURE = {"type": "image", "base64": base64.b64encode(Path(FILE).read_bytes()).decode(), "mime_type": "image/png"}
OF_OPENAI = {"base_url": URL + "/v1", "api_key": "none", "model": MODEL, "max_retries": 0, "max_tokens": 16}

question = [HumanMessage([{"type": "text", "text": "What is it?"}, PICTURE])]
for model in (
    ChatOpenAI(**OF_OPENAI),
    ChatOpenAI(**OF_OPENAI, use_responses_api=True),
    ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_retries=0, max_tokens=16),
):
    assert model.invoke(question).text, type(model)
