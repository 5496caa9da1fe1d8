// The frame of the page: panels, theme, API key, models.
import { ask, setKeys, shown } from "./server.js";
import { startChat } from "./chat.js";
import { startEngine } from "./engine.js";
import { startServed } from "./served.js";

const find = (id) => document.getElementById(id);

function showPanel(name) {
  for (const button of document.querySelectorAll("[data-panel]")) {
    button.setAttribute("aria-pressed", String(button.dataset.panel === name));
  }
  for (const id of ["chat", "engine"]) find(id).classList.toggle("shown", id === name);
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  dispatchEvent(new Event("theme"));
}

async function loadModels() {
  const select = find("model");
  try {
    const { data } = await (await ask("/v1/models")).json();
    select.replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  } catch (error) {
    select.replaceChildren(new Option("no models", ""));
    if (error.status === 401) openKeyDialog();
    else shown(find("state"), error.message, "bad");
  }
}

function openKeyDialog() {
  if (!find("key-dialog").open) find("key-dialog").showModal();
}

find("key-button").addEventListener("click", openKeyDialog);
find("key-dialog").addEventListener("close", () => {
  if (find("key-dialog").returnValue !== "save") return;
  setKeys(find("key").value.trim(), find("admin-key").value.trim());
  loadModels();
  dispatchEvent(new Event("key"));
});
find("theme").addEventListener("click", switchTheme);
for (const button of document.querySelectorAll("[data-panel]")) {
  button.addEventListener("click", () => showPanel(button.dataset.panel));
}
showPanel("chat");
loadModels();
startChat();
startEngine();
startServed();
