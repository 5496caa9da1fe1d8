// A message on the page.
import { button, copyButton, element } from "./elements.js";
import { GrowingText, codeBlock, jsonBlock } from "./markdown.js";
import { probabilities } from "./probabilities.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };
const SLOW_FRAME = 8; // ms of drawing, above which frames are left out

// `actions` are functions of a message: edit, regenerate, canGoOn, goOn, remove, choose, siblings, timeline, wantsResult, giveResult.
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.isStreaming = false;
    this.isDue = false;
    this.nextFrame = 0;
    const name = message.role === "assistant" && message.model ? message.model : NAMES[message.role];
    this.node = element("article", { class: `message ${message.role}`, "aria-label": name });
    this.content = element("div", { class: "text" });
    this.growing = new GrowingText(this.content);
    this.thoughts = element("div", { class: "thoughts" });
    this.thoughtsTitle = element("summary");
    this.thoughtsBox = element("details", { class: "reasoning" }, this.thoughtsTitle, this.thoughts);
    this.above = element("div");
    this.below = element("div");
    const title = element("h2", { class: message.role === "assistant" ? "model-name" : "unseen" }, name);
    this.node.append(title, this.above, ...(message.role === "assistant" ? [this.thoughtsBox] : []), this.content, this.below);
    this.drawNow();
  }

  // At most once a frame, and less often when drawing is slow: tokens come faster than anybody reads.
  draw() {
    if (this.isDue) return;
    this.isDue = true;
    const frame = (now) => {
      if (now < this.nextFrame) {
        requestAnimationFrame(frame);
        return;
      }
      this.isDue = false;
      if (!this.isStreaming) return; // it has ended, and is drawn to its end
      const started = performance.now();
      this.drawNow();
      const spent = performance.now() - started;
      this.nextFrame = spent > SLOW_FRAME ? now + 10 * spent : 0;
    };
    requestAnimationFrame(frame);
  }

  drawNow() {
    const { message } = this;
    this.node.setAttribute("aria-busy", String(this.isStreaming));
    this.drawThoughts();
    if (message.role === "user") {
      this.content.textContent = message.text;
      this.content.hidden = !message.text;
      this.above.replaceChildren(...attached(message));
    } else if (message.role === "tool") {
      this.content.replaceChildren(codeBlock(message.text));
    } else this.drawAnswer();
    // What is below changes with the end of the answer, and with its calls and its size while it comes.
    if (!this.isStreaming) this.below.replaceChildren(...this.ending());
    else if (message.calls?.length) this.below.replaceChildren(...message.calls.filter(Boolean).map(toolCall));
    else if (!this.below.firstChild?.matches?.(".waiting-dots") && !message.text && !message.thoughts) {
      this.below.replaceChildren(element("p", { class: "waiting-dots" }, "Waiting for the first token"));
    } else if (message.text || message.thoughts) this.below.replaceChildren();
  }

  drawAnswer() {
    const block = this.isStreaming ? null : jsonBlock(this.message.text);
    if (block) {
      this.growing.clear();
      this.content.append(block);
    } else this.growing.show(this.message.text, !this.isStreaming);
  }

  drawThoughts() {
    const { thoughts, text } = this.message;
    this.thoughtsBox.hidden = !thoughts;
    if (!thoughts) return;
    const shown = this.thoughts.firstChild;
    if (!shown) this.thoughts.append(thoughts);
    else if (thoughts.length > shown.data.length) shown.appendData(thoughts.slice(shown.data.length));
    this.thoughtsTitle.textContent = this.isStreaming && !text ? "Thinking…" : "Thoughts";
  }

  ending() {
    const { message } = this;
    const calls = message.calls?.filter(Boolean) ?? [];
    const parts = calls.map(toolCall);
    if (this.actions.wantsResult(message)) parts.push(...calls.map((call) => this.resultForm(call)));
    if (message.problem) parts.push(element("p", { class: "error", role: "alert" }, message.problem));
    if (message.facts) parts.push(element("p", { class: "about" }, factsOf(message)));
    parts.push(this.buttons());
    return parts;
  }

  buttons() {
    const { message, actions } = this;
    const row = element("div", { class: "actions" });
    const { place, count } = actions.siblings(message);
    if (count > 1) {
      const earlier = button("‹", () => actions.choose(message, -1), { "aria-label": "Earlier version" });
      const later = button("›", () => actions.choose(message, 1), { "aria-label": "Later version" });
      earlier.disabled = place === 0;
      later.disabled = place === count - 1;
      row.append(earlier, element("span", { class: "version" }, `${place + 1} / ${count}`), later);
    }
    if (message.text) row.append(copyButton("Copy the message", () => message.text));
    if (message.role !== "tool") row.append(button("Edit", () => this.edit()));
    if (message.role === "assistant") {
      row.append(button(message.problem && !message.text ? "Try again" : "Regenerate", () => actions.regenerate(message)));
      if (actions.canGoOn(message)) row.append(button("Continue", () => actions.goOn(message)));
      if (message.logprobs?.length) row.append(this.probabilityButton());
      if (message.requestId) row.append(button("Timeline", () => actions.timeline(message)));
    }
    row.append(button("Delete", () => actions.remove(message), { "aria-label": "Delete the message and what follows" }));
    return row;
  }

  probabilityButton() {
    const node = button("Probabilities", () => {
      const isOn = node.getAttribute("aria-pressed") === "true";
      node.setAttribute("aria-pressed", String(!isOn));
      this.growing.clear();
      if (isOn) this.drawAnswer();
      else this.content.append(probabilities(this.message.logprobs));
    }, { "aria-pressed": "false" });
    return node;
  }

  edit() {
    const { message } = this;
    const area = element("textarea", { rows: String(Math.min(16, message.text.split("\n").length + 1)), "aria-label": "Text of the message" });
    area.value = message.text;
    const leave = () => {
      form.remove();
      this.content.hidden = message.role === "user" && !message.text;
      this.below.hidden = false;
    };
    const form = element("form", { class: "editor" }, area, element("div", { class: "row" },
      element("button", { class: "main" }, message.role === "user" ? "Send" : "Keep"), button("Cancel", leave)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.actions.edit(message, area.value)) leave();
    });
    area.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      leave();
    });
    this.content.hidden = this.below.hidden = true;
    this.below.before(form);
    area.focus();
  }

  resultForm(call) {
    const area = element("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: `what ${call.name} gives` });
    const state = element("span", { class: "about", role: "status" });
    const form = element("form", { class: "editor" }, area, element("div", { class: "row" }, element("button", {}, "Give the result"), state));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      state.textContent = "Kept. The model goes on when every call has its result.";
      this.actions.giveResult(this.message, call, area.value);
    });
    return form;
  }
}

function attached({ images = [], files = [] }) {
  const pictures = images.map((url, place) => element("img", { src: url, alt: `Picture ${place + 1}` }));
  const texts = files.map(({ name, text }) => element("details", { class: "file" },
    element("summary", {}, `${name}, ${text.length} characters`), element("pre", { tabindex: "0" }, text)));
  return [...pictures, ...texts];
}

function toolCall({ name, arguments: text }) {
  return element("details", { class: "call", open: "" }, element("summary", {}, "Calls ", element("code", {}, name)), jsonBlock(text) ?? codeBlock(text, "json"));
}

function factsOf({ facts, reason }) {
  const said = [];
  if (facts.first !== undefined) said.push(`first token ${Math.round(facts.first)} ms`);
  if (facts.output !== undefined) said.push(`${facts.prompt} + ${facts.output} tokens`);
  if (facts.rate) said.push(`${facts.rate.toFixed(1)} tokens/s`);
  if (reason === "stopped") said.push("stopped");
  if (reason === "length") said.push("cut at the most tokens");
  return said.join(" · ");
}
