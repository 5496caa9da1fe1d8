// The list of conversations: search, rename, delete, export and import.
import { isAnswering, open, refresh, shownId, stop } from "./chat.js";
import { asFile, asMarkdown, isFound, newConversation, read, titleOf } from "./conversation.js";
import { announce, button, element, find, save } from "./elements.js";
import { conversations, isKept, load, put, remove, watchOthers } from "./store.js";

const fileName = (title, ending) => `${title.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "chat"}.${ending}`;

export async function startHistory() {
  find("search").addEventListener("input", show);
  find("export-all").addEventListener("click", () => save("octavo-chats.json", asFile([...conversations.values()]), "application/json"));
  find("import").addEventListener("click", () => find("import-files").click());
  find("import-files").addEventListener("change", async () => {
    await importFiles(find("import-files").files);
    find("import-files").value = "";
  });
  addEventListener("conversations", show);
  watchOthers((id, now, before) => {
    refresh(id, now, before);
    show();
  });
  try {
    await load();
    if (!(await isKept())) say("This browser keeps nothing here: chats are gone when the page is closed.");
  } catch (error) {
    say(error.message);
  }
  show();
}

function say(...parts) {
  find("history-state").replaceChildren(...parts);
}

function show() {
  const words = find("search").value;
  const found = [...conversations.values()].filter((each) => isFound(each, words)).sort((one, other) => other.updated - one.updated);
  const focused = document.activeElement?.closest?.("#conversations [data-id]")?.dataset.id;
  find("conversations").replaceChildren(...found.map(row));
  if (focused) find("conversations").querySelector(`[data-id="${focused}"] button`)?.focus();
  find("history-empty").hidden = found.length > 0;
  find("history-empty").textContent = words ? "Nothing found." : "No chats yet.";
}

function row(conversation) {
  const isShown = conversation.id === shownId();
  const title = button(titleOf(conversation), () => {
    open(conversation);
    document.body.classList.remove("history-over");
  }, isShown ? { "aria-current": "true", class: "title" } : { class: "title" });
  if (isAnswering(conversation.id)) title.append(element("span", { class: "busy" }, " …"), element("span", { class: "unseen" }, "is answering"));
  const node = element("li", { "data-id": conversation.id }, title);
  if (isShown) {
    node.append(element("div", { class: "actions" },
      button("Rename", () => rename(node, conversation)),
      button("Markdown", () => save(fileName(titleOf(conversation), "md"), asMarkdown(conversation), "text/markdown"), { "aria-label": "Save as Markdown" }),
      button("JSON", () => save(fileName(titleOf(conversation), "json"), asFile([conversation]), "application/json"), { "aria-label": "Save as JSON" }),
      button("Delete", () => drop(conversation))));
  }
  return node;
}

function rename(node, conversation) {
  const box = element("input", { "aria-label": "Name of the chat", value: titleOf(conversation) });
  const form = element("form", {}, box);
  const leave = async (isNew) => {
    if (isNew) {
      conversation.title = box.value.trim();
      await put(conversation);
    }
    show();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    leave(true);
  });
  box.addEventListener("keydown", (event) => event.key === "Escape" && leave(false));
  node.replaceChildren(form);
  box.select();
}

async function drop(conversation) {
  stop(conversation.id);
  await remove(conversation.id);
  if (conversation.id === shownId()) open(newConversation());
  show();
  say(`“${titleOf(conversation)}” is deleted. `, button("Undo", async () => {
    await put(conversation);
    say();
    open(conversation);
  }));
}

async function importFiles(files) {
  let count = 0;
  try {
    for (const file of files) {
      for (const conversation of read(await file.text())) {
        await put(conversation);
        count += 1;
      }
    }
    say(`${count} ${count === 1 ? "chat" : "chats"} imported.`);
  } catch (error) {
    say(element("span", { class: "error", role: "alert" }, error.message));
  }
  announce(find("history-state").textContent);
  show();
}
