// The Vercel AI SDK: a picture as bytes, whole and streamed. Arguments: URL, model, file.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const [url, name, file] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "octavo", baseURL: `${url}/v1` })(name);
const content = [{ type: "text", text: "What is it?" }, { type: "image", image: readFileSync(file) }];
const asked = { model, messages: [{ role: "user", content }], maxOutputTokens: 10, maxRetries: 0 };

const { text } = await generateText(asked);
assert.ok(text);
assert.equal(await streamText({ ...asked, onError: ({ error }) => assert.fail(error) }).text, text);
