// The openai package of npm: answers, streams, parsed answers, a loop of tools, responses, errors. Arguments: URL, model.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is 2+2?" }];
const asked = { model, messages, temperature: 0, max_tokens: 40 };
const Pet = z.object({ name: z.string().max(8), kind: z.enum(["cat", "dog"]) });

const whole = await client.chat.completions.create(asked);
const text = whole.choices[0].message.content;
assert.ok(text);
assert.ok(whole._request_id);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(streamed, text);
const helper = client.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
assert.equal(await helper.finalContent(), text);
assert.equal((await helper.totalUsage()).completion_tokens, whole.usage.completion_tokens);

const parsed = await client.chat.completions.parse({ ...asked, response_format: zodResponseFormat(Pet, "pet") });
assert.ok(Pet.safeParse(parsed.choices[0].message.parsed).success);

let calls = 0;
const weather = {
  type: "function",
  function: {
    name: "weather",
    parse: JSON.parse,
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
    function: ({ city }) => {
      calls += 1;
      assert.ok(["Oslo", "Rome"].includes(city));
      return `It is sunny in ${city}.`;
    },
  },
};
// A named choice makes this helper end after the call; with `stream` it reads the pieces of the arguments.
for (const stream of [false, true]) {
  const tool_choice = { type: "function", function: { name: "weather" } };
  await client.chat.completions.runTools({ ...asked, tools: [weather], tool_choice, stream }).done();
}
assert.equal(calls, 2);

const response = await client.responses.create({ model, input: "What is 2+2?", temperature: 0, max_output_tokens: 20 });
assert.ok(response.output_text);
let last;
for await (const event of client.responses.stream({ model, input: "What is 2+2?", temperature: 0, max_output_tokens: 20 })) {
  last = event;
}
assert.equal(last.response.output_text ?? last.response.output[0].content[0].text, response.output_text);

assert.equal((await client.models.list()).data[0].id, model);
const vectors = await client.embeddings.create({ model, input: ["Hi", "Ho"] });
assert.equal(vectors.data.length, 2);
assert.ok(vectors.data[0].embedding.some((x) => x !== 0));
await assert.rejects(client.chat.completions.create({ ...asked, max_tokens: 10 ** 6 }), (error) => {
  assert.ok(error instanceof OpenAI.BadRequestError);
  assert.equal(error.code, "context_length_exceeded");
  return true;
});
await assert.rejects(client.models.retrieve("other"), OpenAI.NotFoundError);
