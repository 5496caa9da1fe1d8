// The @google/genai package: contents, streams, a chat, forced calls, schemas, counting, models, and errors. Arguments: URL, model.
import assert from "node:assert/strict";

import { GoogleGenAI, Type } from "@google/genai";

const [url, model] = process.argv.slice(2);
const client = new GoogleGenAI({ apiKey: "none", httpOptions: { baseUrl: url } });
const config = { temperature: 0, maxOutputTokens: 40 };
const asked = { model, contents: "What is 2+2?", config };

const whole = await client.models.generateContent(asked);
assert(whole.text);
let text = "";
let last;
for await (const part of await client.models.generateContentStream(asked)) {
  text += part.text ?? "";
  last = part;
}
assert.equal(text, whole.text);
assert.equal(last.usageMetadata.totalTokenCount, whole.usageMetadata.totalTokenCount);

const chat = client.chats.create({ model, config });
for (const message of ["What is 2+2?", "And 3+3?"]) {
  for await (const part of await chat.sendMessageStream({ message })) assert(part.candidates.length);
}
assert.equal(chat.getHistory(true).filter((content) => content.role === "user").length, 2);

const number = { type: Type.INTEGER };
const add = { name: "add", parameters: { type: Type.OBJECT, properties: { a: number, b: number }, required: ["a", "b"] } };
const functionCallingConfig = { mode: "ANY", allowedFunctionNames: ["add"] };
const forced = { ...config, tools: [{ functionDeclarations: [add] }], toolConfig: { functionCallingConfig } };
const [call] = (await client.models.generateContent({ ...asked, config: forced })).functionCalls;
assert.equal(call.name, "add");
assert.equal(typeof call.args.a, "number");

const city = { type: Type.OBJECT, properties: { name: { type: Type.STRING, maxLength: "20" } }, required: ["name"] };
const formed = { ...config, maxOutputTokens: 200, responseMimeType: "application/json", responseSchema: city };
assert(JSON.parse((await client.models.generateContent({ model, contents: "A city?", config: formed })).text).name);

assert((await client.models.countTokens({ model, contents: "Hi" })).totalTokens > 0);
const names = [];
for await (const each of await client.models.list()) names.push(each.name);
assert.deepEqual(names, [`models/${model}`]);
await assert.rejects(client.models.generateContent({ ...asked, model: "no-such-model" }), { status: 404 });
await assert.rejects(client.models.generateContentStream({ ...asked, model: "no-such-model" }), { status: 404 });
