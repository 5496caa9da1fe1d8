// A conversation: a tree of messages, of which one path is shown and sent. Editing and regenerating make branches.
//
// A message is {id, parent, role, text}, and as it has them: images (data URLs), files ({name, text}), thoughts, calls,
// logprobs, model, group (of answers side by side), facts, problem, reason, changes (of an answer: how many it had).
// The parent of the first is "".
// Nothing here needs a browser.

const FORMAT = "octavo conversations";
const VERSION = 1;
const ROLES = ["user", "assistant", "tool"];
const TITLE_LENGTH = 60;

// crypto.randomUUID is missing on pages that are neither local nor HTTPS.
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  return { id: newId(), title: "", updated: Date.now(), messages: {}, chosen: {} };
}

export const childrenOf = (conversation, parent) => Object.values(conversation.messages).filter((each) => each.parent === parent);

// The messages that are shown, from the first.
export function pathOf(conversation) {
  const last = new Map(); // the youngest child of each message
  for (const message of Object.values(conversation.messages)) last.set(message.parent, message);
  const path = [];
  for (let parent = ""; ;) {
    const next = conversation.messages[conversation.chosen[parent]] ?? last.get(parent);
    if (!next) return path;
    path.push(next);
    parent = next.id;
  }
}

// Adds a message behind another, "" for the first, and shows it.
export function add(conversation, parent, fields) {
  const message = { id: newId(), parent, text: "", ...fields };
  conversation.messages[message.id] = message;
  conversation.chosen[parent] = message.id;
  conversation.updated = Date.now();
  return message;
}

// Removes a message and all that follow it.
export function remove(conversation, id) {
  for (const child of childrenOf(conversation, id)) remove(conversation, child.id);
  const { parent } = conversation.messages[id];
  if (conversation.chosen[parent] === id) delete conversation.chosen[parent];
  delete conversation.messages[id];
  delete conversation.chosen[id];
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.messages).find((message) => message.role === "user");
  const line = first?.text.trim().split("\n")[0] ?? "";
  if (!line) return first ? "Without words" : "New chat";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()}…` : line;
}

export function isFound(conversation, words) {
  const wanted = words.trim().toLowerCase();
  return !wanted || [titleOf(conversation), ...Object.values(conversation.messages).map((message) => message.text)]
    .some((text) => text.toLowerCase().includes(wanted));
}

const fenced = ({ name, text }) => {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text}\n${fence}`;
};

function contentOf(message) {
  const text = [message.text, ...(message.files ?? []).map(fenced)].filter(Boolean).join("\n\n");
  if (!message.images?.length) return text;
  return [...message.images.map((url) => ({ type: "image_url", image_url: { url } })), ...(text ? [{ type: "text", text }] : [])];
}

const joined = (one, other) => {
  if (typeof one === "string" && typeof other === "string") return `${one}\n\n${other}`;
  const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);
  return [...parts(one), ...parts(other)];
};

// The messages of a path as the API takes them. An answer that has nothing in it, because of an error, is left out, and
// the two messages around it become one: many chat templates take no two of a user in a row.
export function asBody(path, system = "") {
  const sent = system ? [{ role: "system", content: system }] : [];
  for (const message of path) {
    if (message.role === "tool") {
      sent.push({ role: "tool", tool_call_id: message.callId, content: message.text });
    } else if (message.role === "assistant") {
      if (!message.text && !message.calls?.length) continue;
      const calls = message.calls?.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
      sent.push({ role: "assistant", content: message.text, ...(calls?.length ? { tool_calls: calls } : {}) });
    } else if (sent.at(-1)?.role === "user") {
      sent.at(-1).content = joined(sent.at(-1).content, contentOf(message));
    } else {
      sent.push({ role: "user", content: contentOf(message) });
    }
  }
  return sent;
}

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

// The path that is shown, as Markdown.
export function asMarkdown(conversation) {
  const parts = pathOf(conversation).map((message) => {
    const calls = (message.calls ?? []).map((call) => `\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``);
    const files = (message.files ?? []).map(fenced);
    const images = (message.images ?? []).map((url, place) => `![Image ${place + 1}](${url})`);
    const name = message.model ? `${NAMES[message.role]} of ${message.model}` : NAMES[message.role];
    return [`## ${name}`, message.text, ...files, ...images, ...calls].filter(Boolean).join("\n\n");
  });
  return `${[`# ${titleOf(conversation)}`, ...parts].join("\n\n")}\n`;
}

export const asFile = (conversations) => JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);

// The conversations of a file that `asFile` wrote, or of one with messages as the API takes them. Throws an error that says
// what is wrong.
export function read(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is not a JSON file: ${error.message}`);
  }
  if (Array.isArray(value?.messages)) return [ofMessages(value.messages)];
  if (value?.format !== FORMAT) throw new Error(`'format' must be "${FORMAT}", or there must be a list 'messages'.`);
  if (value.version !== VERSION) throw new Error(`'version' must be ${VERSION}.`);
  if (!Array.isArray(value.conversations)) throw new Error("'conversations' must be a list.");
  return value.conversations.map(checked);
}

const isText = (value) => typeof value === "string";
const isImage = (value) => isText(value) && /^data:image\/[a-z+.-]+;base64,/.test(value);
const isOptional = (value, test) => value === undefined || test(value);
const isListOf = (value, test) => isOptional(value, (list) => Array.isArray(list) && list.every(test));
const FIELDS = {
  text: isText,
  thoughts: (value) => isOptional(value, isText),
  model: (value) => isOptional(value, isText),
  images: (value) => isListOf(value, isImage),
  files: (value) => isListOf(value, (file) => isText(file?.name) && isText(file?.text)),
  calls: (value) => isListOf(value, (call) => isText(call?.name) && isText(call?.arguments)),
  logprobs: (value) => isListOf(value, (entry) => isText(entry?.token) && Number.isFinite(entry?.logprob) && Array.isArray(entry?.top)),
};

// What is read is another's text: only fields that are known, with the types that the page relies on. Ids are new, so that
// nothing kept is overwritten.
function checked(value, number) {
  const where = `conversations[${number}]`;
  if (!value || typeof value.messages !== "object" || !value.messages) throw new Error(`'${where}.messages' must be an object.`);
  const conversation = newConversation();
  conversation.title = isText(value.title) ? value.title : "";
  conversation.updated = Number.isFinite(value.updated) ? value.updated : conversation.updated;
  const ids = new Map([["", ""]]);
  for (const [id, message] of Object.entries(value.messages)) {
    const place = `${where}.messages.${id}`;
    if (!ROLES.includes(message?.role)) throw new Error(`'${place}.role' must be one of ${ROLES.join(", ")}.`);
    // Parents stand before their children, so there is no circle.
    if (!ids.has(message.parent)) throw new Error(`'${place}.parent' must be a message before it, or "".`);
    for (const [name, test] of Object.entries(FIELDS)) if (!test(message[name])) throw new Error(`'${place}.${name}' is not what it must be.`);
    const kept = Object.fromEntries([...Object.keys(FIELDS), "callId", "group"].filter((name) => message[name] !== undefined).map((name) => [name, message[name]]));
    ids.set(id, add(conversation, ids.get(message.parent), { role: message.role, ...kept }).id);
  }
  conversation.updated = Number.isFinite(value.updated) ? value.updated : conversation.updated;
  for (const [parent, child] of Object.entries(value.chosen ?? {})) {
    if (ids.has(parent) && ids.has(child)) conversation.chosen[ids.get(parent)] = ids.get(child);
  }
  return conversation;
}

function ofMessages(messages) {
  const conversation = newConversation();
  let parent = "";
  messages.forEach((message, number) => {
    if (message?.role === "system") return;
    if (!ROLES.includes(message?.role)) throw new Error(`'messages[${number}].role' must be one of system, ${ROLES.join(", ")}.`);
    const parts = Array.isArray(message.content) ? message.content : [{ type: "text", text: message.content ?? "" }];
    const text = parts.filter((part) => isText(part?.text)).map((part) => part.text).join("\n");
    const images = parts.map((part) => part?.image_url?.url).filter(isImage);
    parent = add(conversation, parent, { role: message.role, text, ...(images.length ? { images } : {}) }).id;
  });
  return conversation;
}
