// The @anthropic-ai/sdk package: messages, streams, tools, counting, errors. Arguments: URL, model.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 2+2?" }];
const asked = { model, messages, max_tokens: 60, temperature: 0 };

const whole = await client.messages.create(asked);
assert.ok(whole.content[0].text);
const stream = client.messages.stream(asked);
let text = "";
stream.on("text", (piece) => (text += piece));
const final = await stream.finalMessage();
assert.equal(text, whole.content[0].text);
assert.deepEqual(final.content, whole.content);
assert.equal(final.usage.output_tokens, whole.usage.output_tokens);

const tools = [
  {
    name: "weather",
    input_schema: { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"], additionalProperties: false },
  },
];
const called = await client.messages.stream({ ...asked, tools, tool_choice: { type: "any" } }).finalMessage();
const use = called.content.find((block) => block.type === "tool_use");
assert.ok(["Oslo", "Rome"].includes(use.input.city));
const result = { type: "tool_result", tool_use_id: use.id, content: "It is sunny." };
const history = [...messages, { role: "assistant", content: called.content }, { role: "user", content: [result] }];
assert.ok((await client.messages.create({ ...asked, tools, messages: history })).content);

assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 0);
await assert.rejects(client.messages.create({ ...asked, max_tokens: 0 }), Anthropic.BadRequestError);
