// @openai/agents: agents with a tool that must be called, streams, a schema, over two APIs. Arguments: URL, model.
import assert from "node:assert/strict";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const weather = tool({
  name: "weather",
  description: "Look up the weather of a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
const City = z.object({ name: z.string(), country: z.string() });
const question = "How is the weather in Paris?";

for (const Kind of [OpenAIChatCompletionsModel, OpenAIResponsesModel]) {
  const model = new Kind(client, name);
  const basic = { name: "assistant", instructions: "Be brief.", model };
  const plain = new Agent({ ...basic, modelSettings: { maxTokens: 200 } });
  assert.equal(typeof (await run(plain, "What is 2+2?")).finalOutput, "string");
  const stream = await run(plain, "What is 2+2?", { stream: true });
  let text = "";
  for await (const piece of stream.toTextStream()) text += piece;
  await stream.completed;
  assert.equal(text, stream.finalOutput);

  const modelSettings = { maxTokens: 400, toolChoice: "required", parallelToolCalls: false };
  const called = await run(new Agent({ ...basic, tools: [weather], modelSettings }), question);
  const kinds = called.newItems.map((item) => item.type);
  assert.ok(kinds.indexOf("tool_call_item") >= 0);
  assert.ok(kinds.indexOf("tool_call_output_item") > kinds.indexOf("tool_call_item"));

  const typed = new Agent({ ...basic, outputType: City, modelSettings: { maxTokens: 400 } });
  City.parse((await run(typed, "Which city has the Eiffel tower?")).finalOutput);
}
