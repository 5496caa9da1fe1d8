// The Vercel AI SDK with its provider for OpenAI-compatible servers. Arguments: URL, model.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embed, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "octavo",
  baseURL: `${url}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider(name);
const asked = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const pet = z.object({ name: z.string().max(8), kind: z.enum(["cat", "dog"]) });
const weather = tool({
  description: "Look up the weather.",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});

const whole = await generateText({ ...asked, prompt: "What is 2+2?" });
assert.ok(whole.text);
assert.ok(["stop", "length"].includes(whole.finishReason));
assert.equal(whole.usage.totalTokens, whole.usage.inputTokens + whole.usage.outputTokens);

const stream = streamText({ ...asked, prompt: "What is 2+2?", onError: ({ error }) => assert.fail(error) });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await stream.finishReason, whole.finishReason);

assert.ok(pet.safeParse((await generateObject({ ...asked, schema: pet, prompt: "Make up a pet." })).object).success);
const objects = streamObject({ ...asked, schema: pet, prompt: "Make up a pet." });
for await (const partial of objects.partialObjectStream) assert.equal(typeof partial, "object");
assert.ok(pet.safeParse(await objects.object).success);

// Exactly as a program of tools runs: a call, its result, and an answer.
const toolChoice = { type: "tool", toolName: "weather" };
const tooled = { ...asked, tools: { weather }, prompt: "How is the weather in Rome?" };
const called = await generateText({ ...tooled, toolChoice });
assert.equal(called.toolCalls[0].toolName, "weather");
assert.match(called.toolResults[0].output, /sunny/);
const steps = streamText({
  ...tooled,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? toolChoice : "none" }),
  onError: ({ error }) => assert.fail(error),
});
assert.equal((await steps.steps).length, 2);
assert.equal((await steps.steps)[0].toolCalls[0].toolName, "weather");

const completion = await generateText({ ...asked, model: provider.completionModel(name), prompt: "One two three" });
assert.ok(completion.text);
const { embedding } = await embed({ model: provider.textEmbeddingModel(name), value: "Hi", maxRetries: 0 });
assert.ok(embedding.length > 100);

await assert.rejects(generateText({ ...asked, prompt: "long ".repeat(20000) }), (error) => {
  assert.ok(APICallError.isInstance(error));
  assert.equal(error.statusCode, 400);
  assert.match(error.message, /maximum context length/);
  return true;
});
