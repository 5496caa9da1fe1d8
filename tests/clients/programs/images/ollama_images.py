"""The ollama package: a picture by its path in a chat, and by its bytes in a prompt. Arguments: URL, model, file."""

from __future__ import annotations

import sys
from pathlib import Path

import ollama

URL, MODEL, FILE = sys.argv[1:]
CLIENT = ollama.Client(host=URL)

message = {"role": "user", "content": "What is it?", "images": [FILE]}
assert CLIENT.chat(model=MODEL, messages=[message], options={"num_predict": 10}).message.content
prompt = CLIENT.generate(
    model=MODEL, prompt="What is it?", images=[Path(FILE).read_bytes()], options={"num_predict": 10}
)
assert prompt.response
