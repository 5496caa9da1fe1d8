"""The google-genai package: a picture by its bytes, whole and streamed. Arguments: URL, model, file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from google import genai
from google.genai import types

URL, MODEL, FILE = sys.argv[1:]
CLIENT = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=URL))

picture = types.Part.from_bytes(data=Path(FILE).read_bytes(), mime_type="image/png")
asked: dict[str, Any] = {"model": MODEL, "contents": [picture, "What is it?"], "config": {"max_output_tokens": 10}}
assert CLIENT.models.generate_content(**asked).text
assert "".join(part.text or "" for part in CLIENT.models.generate_content_stream(**asked))
