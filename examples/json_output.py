"""Answers that keep to a JSON schema, whatever the model would rather say."""

import json

import octavo
from octavo import SamplingParams
from octavo.grammar.forms import grammar_text, json_schema

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def main(model: str = "smollm2-135m") -> None:
    params = SamplingParams(temperature=0, max_tokens=64, grammar=grammar_text(json_schema(SCHEMA)))
    with octavo.LLM(model) as llm:
        (result,) = llm.generate("A city of France, as JSON:", params)
    answer = json.loads(result.outputs[0].text)
    print(answer["city"], answer["is_capital"])


if __name__ == "__main__":
    main()
