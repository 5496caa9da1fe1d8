"""DSPy: texts over three APIs, several answers at once, and a signature by JSON schema. Arguments: URL, model."""

from __future__ import annotations

import sys

import dspy

URL, MODEL = sys.argv[1:]


def model(kind: str, name: str = MODEL, **more: object) -> dspy.LM:
    options = {"api_base": URL + "/v1", "api_key": "none", "cache": False, "num_retries": 0, **more}
    return dspy.LM(f"openai/{name}", model_type=kind, **options)


class Extract(dspy.Signature):
    """Extract the person."""

    text: str = dspy.InputField()
    name: str = dspy.OutputField()
    age: int = dspy.OutputField()


for kind in ("chat", "text", "responses"):
    (answer,) = model(kind, temperature=0, max_tokens=40)("What is 2+2?")
    assert answer["text"] if isinstance(answer, dict) else answer
chat = model("chat", temperature=0.9, max_tokens=40)
assert len(chat("What is 2+2?", n=3)) == 3
assert chat.history[-1]["usage"]["completion_tokens"] > 0
with dspy.context(lm=model("chat", temperature=0, max_tokens=300), adapter=dspy.JSONAdapter()):
    found = dspy.Predict(Extract)(text="Bob is 31 years old.")
assert isinstance(found.name, str)
assert isinstance(found.age, int)

try:
    model("chat", "other")("Hi")
except Exception as error:  # its classes change from release to release
    message = str(error)
assert "The model `other` does not exist." in message
