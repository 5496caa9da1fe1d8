// The chat: streamed answers of /v1/chat/completions.
import { ask, element, events } from "./server.js";
import { rendered } from "./markdown.js";
import { showTimeline } from "./engine.js";

const find = (id) => document.getElementById(id);
let messages = [];
let running = null;

export function startChat() {
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  find("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      find("composer").requestSubmit();
    }
  });
  find("stop").addEventListener("click", () => running?.abort());
  find("reset").addEventListener("click", () => {
    running?.abort();
    messages = [];
    find("messages").replaceChildren();
    find("prompt").focus();
  });
}

function number(id) {
  const text = find(id).value.trim();
  return text === "" ? undefined : Number(text);
}

// The JSON in a field, undefined if it is empty; throws an error that names the field.
function json(id, name) {
  const text = find(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

function body(conversation) {
  const schema = json("schema", "JSON schema");
  const system = find("system").value.trim();
  return {
    model: find("model").value,
    messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    tools: json("tools", "Tools"),
    response_format: schema && { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
  };
}

function add(kind, ...children) {
  const node = element("div", { class: `message ${kind}` }, ...children);
  const list = find("messages");
  list.append(node);
  list.scrollTop = list.scrollHeight;
  return node;
}

function setRunning(controller) {
  running = controller;
  find("stop").hidden = !controller;
  find("send").hidden = !!controller;
}

async function send() {
  const text = find("prompt").value.trim();
  if (!text) return;
  const conversation = [...messages, { role: "user", content: text }];
  let request;
  try {
    request = body(conversation);
  } catch (error) {
    add("error", error.message);
    return;
  }
  add("user", text);
  find("prompt").value = "";
  const view = new AnswerView(add("assistant"));
  setRunning(new AbortController());
  try {
    const response = await ask("/v1/chat/completions", request, running.signal);
    for await (const event of events(response)) view.take(event);
    messages = [...conversation, view.message()];
  } catch (error) {
    if (error.name !== "AbortError") view.fail(error.message);
    else if (view.node.isConnected) messages = [...conversation, view.message()]; // else: a new chat was begun
  } finally {
    view.finish();
    setRunning(null);
    find("prompt").focus();
  }
}

class AnswerView {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.thoughts = "";
    this.calls = [];
    this.started = performance.now();
    this.first = 0;
    this.isDue = false;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message ?? String(event.error));
    this.id = event.id ?? this.id;
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.reason = choice.finish_reason ?? this.reason;
    const delta = choice.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls) this.first ||= performance.now();
    this.text += delta.content ?? "";
    this.thoughts += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const part of delta.tool_calls ?? []) {
      const call = (this.calls[part.index] ??= { id: part.id, name: "", arguments: "" });
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    this.draw();
  }

  // At most once a frame: tokens come faster than anybody reads.
  draw() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      this.drawNow();
    });
  }

  drawNow() {
    const list = find("messages");
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 80;
    const parts = rendered(this.text);
    if (this.thoughts) parts.unshift(element("div", { class: "thoughts" }, this.thoughts));
    for (const call of this.calls.filter(Boolean)) {
      parts.push(element("pre", { tabindex: "0" }, element("code", {}, `${call.name}(${call.arguments})`)));
    }
    if (this.problem) parts.push(element("p", { class: "error", role: "alert" }, this.problem));
    if (this.about) parts.push(this.about);
    this.node.replaceChildren(...parts);
    if (follows) list.scrollTop = list.scrollHeight;
  }

  fail(message) {
    this.problem = message;
  }

  message() {
    const calls = this.calls.filter(Boolean).map((call) => ({
      id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
    }));
    return { role: "assistant", content: this.text, ...(calls.length ? { tool_calls: calls } : {}) };
  }

  finish() {
    const end = performance.now();
    const facts = [];
    if (this.first) facts.push(`first token ${Math.round(this.first - this.started)} ms`);
    if (this.usage) {
      const seconds = (end - this.first) / 1000;
      facts.push(`${this.usage.prompt_tokens} + ${this.usage.completion_tokens} tokens`);
      if (seconds > 0) facts.push(`${((this.usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    } else if (!this.problem) facts.push("stopped");
    if (this.reason === "length") facts.push("cut at the most tokens");
    this.about = element("div", { class: "about" }, facts.join(" · "));
    if (this.id) {
      const button = element("button", { type: "button" }, "timeline");
      button.addEventListener("click", () => showTimeline(this.id));
      this.about.append(button);
    }
    this.drawNow();
  }
}
