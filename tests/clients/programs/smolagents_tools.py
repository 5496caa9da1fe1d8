"""smolagents: texts, streams, stop strings, forced calls, a schema, and an agent. Arguments: URL, model."""

from __future__ import annotations

import json
import sys

from smolagents import AgentMaxStepsError, ChatMessage, MessageRole, OpenAIServerModel, ToolCallingAgent, tool

URL, MODEL = sys.argv[1:]
QUESTION = [ChatMessage(MessageRole.USER, "What is 2+2?")]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "schema": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]},
    },
}


@tool
def weather(city: str) -> str:
    """Look up the weather of a city.

    Args:
        city: The name of the city
    """
    return f"It is sunny in {city}."


model = OpenAIServerModel(MODEL, api_base=URL + "/v1", api_key="none", max_tokens=100, temperature=0)
whole = model.generate(QUESTION)
assert whole.content
assert whole.token_usage.output_tokens > 0
parts = list(model.generate_stream(QUESTION))
assert "".join(part.content or "" for part in parts) == whole.content
assert sum(part.token_usage.output_tokens for part in parts if part.token_usage) == whole.token_usage.output_tokens
assert " 4" not in model.generate(QUESTION, stop_sequences=[" 4"]).content
# With tools the package asks for a call.
called = model.generate([ChatMessage(MessageRole.USER, "How is the weather in Paris?")], tools_to_call_from=[weather])
call = called.tool_calls[0].function
arguments = json.loads(call.arguments) if isinstance(call.arguments, str) else call.arguments
assert weather(**arguments).startswith("It is sunny")
assert json.loads(model.generate(QUESTION, response_format=SCHEMA).content)["name"] is not None

agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
agent.run("How is the weather in Paris?")
steps = [step for step in agent.memory.steps if getattr(step, "tool_calls", None)]
assert steps
assert all(isinstance(step.error, AgentMaxStepsError | None) for step in steps)
