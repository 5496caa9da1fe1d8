// The ollama package of npm: chat, generate, streams, tools, schemas, models, errors. Arguments: URL, model.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const client = new Ollama({ host });
const messages = [{ role: "user", content: "What is 2+2?" }];
const options = { temperature: 0, num_predict: 40 };

const whole = await client.chat({ model, messages, options });
assert.ok(whole.message.content);
assert.ok(whole.eval_count > 0);
let text = "";
let last;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, whole.message.content);
assert.equal(last.done, true);
assert.equal(last.eval_count, whole.eval_count);

const parameters = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, country: { type: "string", maxLength: 20 } },
  required: ["name", "country"],
};
const asked = [{ role: "user", content: "Which city has the Eiffel tower?" }];
const shaped = await client.chat({ model, messages: asked, format: parameters, options: { ...options, num_predict: 200 } });
assert.deepEqual(Object.keys(JSON.parse(shaped.message.content)).sort(), ["country", "name"]);
const tools = [{ type: "function", function: { name: "city", description: "Look up a city.", parameters } }];
assert.ok((await client.chat({ model, messages: asked, tools, options })).message);

assert.ok((await client.generate({ model, prompt: "Once upon a time", options })).response);
assert.ok((await client.list()).models.some((found) => found.model === model));
assert.ok((await client.show({ model })).capabilities.includes("completion"));
assert.ok((await client.embed({ model, input: ["Hi", "Ho"] })).embeddings.length === 2);
await assert.rejects(client.chat({ model: "no-such-model", messages }), (error) => error.status_code === 404);
