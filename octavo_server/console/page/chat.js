// The conversation that is shown: what is sent, and what comes back.
import { readAnswer } from "./answers.js";
import { hasAttachments, startAttachments, takeAttachments } from "./attachments.js";
import { add, asBody, childrenOf, newConversation, newId, pathOf, remove } from "./conversation.js";
import { announce, button, element, find } from "./elements.js";
import { MessageView } from "./message_view.js";
import { chosenModel } from "./models.js";
import { requestSettings } from "./settings.js";
import { conversations, put } from "./store.js";
import { showTimeline } from "./timeline.js";

const SAVE_EVERY = 2000; // ms, while an answer comes
const NEAR_END = 80; // pixels from the end, within which the page follows an answer
const EXAMPLES = ["Explain what a KV cache is, in three sentences.", "Write a Python function that finds prime numbers.", "Plan a weekend in a city that you choose, as a table."];
const hasFinePointer = matchMedia("(pointer: fine)");
const streams = new Map(); // of answers that are coming: message id -> {conversation, controller}
let views = new Map(); // of the shown conversation: message id -> MessageView
let conversation = newConversation();
let isFollowing = true; // whether the page follows an answer: until somebody scrolls up
let lastTop = 0;
const sizes = new ResizeObserver(() => isFollowing && toEnd()); // of the messages

export function startChat() {
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!ownStreams().length) send();
  });
  find("prompt").addEventListener("keydown", onKey);
  find("prompt").addEventListener("input", fit);
  find("stop").addEventListener("click", () => stop());
  find("reset").addEventListener("click", () => open(newConversation()));
  find("messages").addEventListener("scroll", () => {
    const { scrollHeight, scrollTop, clientHeight } = find("messages");
    // What grows meanwhile moves the end, but not the place; only somebody who reads moves up.
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) isFollowing = true;
    else if (scrollTop < lastTop) isFollowing = false;
    lastTop = scrollTop;
  });
  addEventListener("pagehide", () => {
    for (const { conversation: owner } of streams.values()) keep(owner);
  });
  startAttachments();
  show();
}

export const shownId = () => conversation.id;

// Shows a conversation; answers to others go on coming.
export function open(next) {
  conversation = next;
  find("chat-note").replaceChildren();
  forgetViews();
  find("messages").replaceChildren();
  show();
  toEnd();
  if (hasFinePointer.matches) find("prompt").focus();
  dispatchEvent(new Event("conversations"));
}

const sizeOf = (message) => JSON.stringify(message).length;
// Above 0 if the first of two states of a message is the later: an answer counts its changes, other messages only grow.
const howMuchLater = (one, other) => (one.changes ?? 0) - (other.changes ?? 0) || sizeOf(one) - sizeOf(other);
const streamsOf = (id) => [...streams.values()].filter((stream) => stream.conversation.id === id);
const ownStreams = () => streamsOf(conversation.id);
export const isAnswering = (id) => streamsOf(id).length > 0;

// Ends the answers of a conversation that are coming.
export function stop(id = conversation.id) {
  for (const { controller } of streamsOf(id)) controller.abort();
}

function onKey(event) {
  // On a phone, Enter is the only way to a new line.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && (hasFinePointer.matches || event.ctrlKey)) {
    event.preventDefault();
    find("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !find("prompt").value) {
    const last = pathOf(conversation).findLast((message) => message.role === "user");
    if (!last) return;
    event.preventDefault();
    views.get(last.id)?.edit();
  }
}

function fit() {
  const node = find("prompt");
  node.style.height = "auto";
  node.style.height = `${Math.min(node.scrollHeight + 2, innerHeight / 3)}px`;
}

// ---- sending

function send() {
  const text = find("prompt").value.trim();
  if (!text && !hasAttachments()) return;
  const settings = requestSettings();
  if (!settings) return;
  const message = add(conversation, pathOf(conversation).at(-1)?.id ?? "", { role: "user", text, ...takeAttachments() });
  find("prompt").value = "";
  fit();
  answer(message.id, settings);
}

// Asks for the message that follows `parent`: of each chosen model one, side by side if there are several.
function answer(parent, settings) {
  const owner = conversation;
  find("chat-note").replaceChildren(); // an undo would lose what is added now
  stop(owner.id);
  const group = settings.models.length > 1 ? { group: newId() } : {};
  const messages = settings.models.map((model) => add(owner, parent, { role: "assistant", model, ...group }));
  owner.chosen[parent] = messages[0].id;
  for (const message of messages) stream(owner, message, settings);
  show();
  toEnd();
}

// Lets `message` be answered, or go on if it has a text already.
async function stream(owner, message, settings) {
  const controller = new AbortController();
  streams.set(message.id, { conversation: owner, controller });
  const path = [];
  for (let at = message.text ? message : owner.messages[message.parent]; at; at = owner.messages[at.parent]) path.unshift(at);
  const body = {
    model: message.model || chosenModel(),
    messages: asBody(path, settings.system),
    stream: true,
    stream_options: { include_usage: true },
    ...settings.fields,
    ...(message.text ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
  showState();
  keep(owner);
  let saved = performance.now();
  await readAnswer(message, body, controller.signal, () => {
    viewOf(owner, message)?.draw();
    if (performance.now() - saved < SAVE_EVERY) return;
    saved = performance.now();
    keep(owner);
  });
  streams.delete(message.id);
  if (conversations.has(owner.id)) keep(owner); // else it was deleted meanwhile
  const view = viewOf(owner, message);
  if (view) {
    view.isStreaming = false;
    view.drawNow();
    announce(message.problem ?? `Answer: ${message.text.slice(0, 2000)}`);
  }
  showState();
}

async function keep(owner) {
  owner.updated = Date.now();
  try {
    await put(owner);
    find("chat-problem").textContent = "";
  } catch (error) {
    find("chat-problem").textContent = error.message;
  }
  dispatchEvent(new Event("conversations"));
}

// ---- showing

const viewOf = (owner, message) => (owner === conversation ? views.get(message.id) : undefined);

const actions = {
  siblings(message) {
    const all = versionsOf(message);
    return { place: all.indexOf(message), count: all.length };
  },
  choose(message, step) {
    const all = versionsOf(message);
    conversation.chosen[message.parent] = all[all.indexOf(message) + step].id;
    redraw();
  },
  edit(message, text) {
    const kept = { ...message, text: text.trim() };
    for (const name of ["id", "parent", "facts", "problem", "reason", "logprobs", "group", "requestId", "changes"]) delete kept[name];
    if (message.role !== "user") {
      add(conversation, message.parent, kept);
      redraw();
      return true;
    }
    if (!kept.text && !kept.images && !kept.files) return false;
    const settings = requestSettings();
    if (settings) answer(add(conversation, message.parent, kept).id, settings);
    return !!settings;
  },
  regenerate(message) {
    const settings = requestSettings();
    if (settings) answer(message.parent, settings);
  },
  // Also what was edited, and what a reload of the page cut off: it has no reason to have ended.
  canGoOn: (message) => !!message.text && !message.calls?.length && message.reason !== "stop",
  goOn(message) {
    const settings = requestSettings();
    if (!settings) return;
    stream(conversation, message, settings);
    show();
  },
  remove(message) {
    stop();
    const owner = conversation;
    const { messages, chosen } = structuredClone(owner);
    remove(owner, message.id);
    redraw();
    find("chat-note").replaceChildren("The message and what followed it are deleted. ", button("Undo", () => {
      Object.assign(owner, { messages, chosen });
      find("chat-note").replaceChildren();
      if (owner === conversation) redraw();
      else keep(owner);
    }));
  },
  timeline: (message) => showTimeline(message.requestId),
  wantsResult: (message) => !!message.calls?.length && pathOf(conversation).at(-1) === message,
  // The model goes on once each of its calls has a result.
  giveResult(message, call, text) {
    const results = { ...message.results, [message.calls.indexOf(call)]: text };
    message.results = results;
    if (Object.keys(results).length < message.calls.length) return;
    const settings = requestSettings();
    if (!settings) return;
    let parent = message.id;
    message.calls.forEach(({ id }, place) => { parent = add(conversation, parent, { role: "tool", callId: id, text: results[place] }).id; });
    answer(parent, settings);
  },
};

// The message and what may stand in its place; answers side by side are one.
function versionsOf(message) {
  const all = childrenOf(conversation, message.parent);
  return all.filter((each) => !each.group || each === message || (each.group !== message.group && each === all.find((other) => other.group === each.group)));
}

function forgetViews() {
  views = new Map();
  sizes.disconnect();
}

function redraw() {
  keep(conversation);
  forgetViews();
  show();
}

// Brings the page to what the conversation is now; messages that are there already stay as they are.
function show() {
  const list = find("messages");
  const path = pathOf(conversation);
  const nodes = path.map((message) => (message.group ? besideNode(message) : nodeOf(message)));
  if (!nodes.length) nodes.push(greeting());
  nodes.forEach((node, place) => {
    if (list.children[place] !== node) list.insertBefore(node, list.children[place] ?? null);
  });
  while (list.children.length > nodes.length) list.lastChild.remove();
  showState();
}

function nodeOf(message) {
  let view = views.get(message.id);
  const isStreaming = streams.has(message.id);
  if (!view) {
    view = new MessageView(message, actions);
    sizes.observe(view.node);
    views.set(message.id, view);
  }
  if (view.isStreaming !== isStreaming || !isStreaming) {
    if (isStreaming) view.growing.clear(); // its end may go on
    view.isStreaming = isStreaming;
    view.drawNow();
  }
  return view.node;
}

// Answers of several models to one message.
function besideNode(message) {
  const all = childrenOf(conversation, message.parent).filter((each) => each.group === message.group);
  const columns = all.map((each) => {
    const column = element("div", { class: each === message ? "column chosen" : "column" }, nodeOf(each));
    if (each !== message) column.append(button("Go on with this one", () => {
      conversation.chosen[message.parent] = each.id;
      redraw();
    }));
    return column;
  });
  return element("div", { class: "beside" }, ...columns);
}

function greeting() {
  const examples = EXAMPLES.map((text) => button(text, () => {
    find("prompt").value = text;
    fit();
    find("prompt").focus();
  }));
  return element("div", { class: "greeting" }, element("h2", {}, "What shall it be about?"),
    element("p", {}, "Conversations stay in this browser. Pictures, texts and questions go to this server alone."), ...examples);
}

function toEnd() {
  isFollowing = true;
  find("messages").scrollTop = find("messages").scrollHeight;
}

function showState() {
  const isRunning = ownStreams().length > 0;
  find("stop").hidden = !isRunning;
  find("send").hidden = isRunning;
}

// Another tab has changed a conversation: it is shown as it is now, where it stands. Both tabs may be answering in it, and
// each keeps all of it. The other may have deleted it and taken that back: what is answered here has its place again.
export function refresh(id, now, before = streamsOf(id)[0]?.conversation) {
  if (!now) return;
  const isLive = isAnswering(id);
  let hasMore = false;
  for (const own of Object.values(before?.messages ?? {})) {
    const other = now.messages[own.id];
    const difference = other ? howMuchLater(own, other) : 0;
    if (other ? difference >= 0 || streams.has(own.id) : isLive) now.messages[own.id] = own;
    hasMore ||= difference > 0;
  }
  if (isLive) {
    Object.assign(before, { messages: now.messages, chosen: { ...now.chosen, ...before.chosen } });
    conversations.set(id, before); // what the streams write to
  } else if (hasMore) keep(now);
  if (id !== conversation.id) return;
  conversation = isLive ? before : now;
  forgetViews();
  show();
}
