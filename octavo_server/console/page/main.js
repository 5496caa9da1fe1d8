// The frame of the page: panels, theme, API key, shortcuts.
import { open, stop, startChat } from "./chat.js";
import { newConversation } from "./conversation.js";
import { find, remember, remembered, shown } from "./elements.js";
import { startEngine } from "./engine.js";
import { startHistory } from "./history.js";
import { loadModels, showOthers } from "./models.js";
import { setKeys } from "./server.js";
import { startServed } from "./served.js";
import { startSettings } from "./settings.js";

const isWide = matchMedia("(min-width: 60rem)");

// On a wide screen the panels stand beside the chat, and the browser keeps which; on a narrow one they cover it for a while.
function togglePanel(name, isOn = !document.body.classList.contains(isWide.matches ? `with-${name}` : `${name}-over`)) {
  if (isWide.matches) {
    document.body.classList.toggle(`with-${name}`, isOn);
    remember(`with-${name}`, isOn);
  } else {
    for (const other of ["engine", "history"]) document.body.classList.toggle(`${other}-over`, other === name && isOn);
  }
  showPanels();
}

function showPanels() {
  for (const name of ["engine", "history"]) {
    const isOn = document.body.classList.contains(isWide.matches ? `with-${name}` : `${name}-over`);
    find(`${name}-button`).setAttribute("aria-pressed", String(isOn));
  }
  dispatchEvent(new Event("resize"));
}

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  dispatchEvent(new Event("theme"));
}

function switchTheme() {
  const isSystemDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const isDark = (document.documentElement.dataset.theme ?? (isSystemDark ? "dark" : "light")) === "dark";
  const theme = isDark === isSystemDark ? (isDark ? "light" : "dark") : ""; // the other one, then the system's again
  remember("theme", theme);
  showTheme(theme);
}

function openKeyDialog() {
  if (!find("key-dialog").open) find("key-dialog").showModal();
}

async function showModels() {
  try {
    await loadModels();
  } catch (error) {
    if (error.status === 401) openKeyDialog();
    else shown(find("state"), error.message, "bad");
  }
}

const SHORTCUTS = {
  O: () => open(newConversation()),
  K: () => {
    togglePanel("history", true);
    find("search").focus();
  },
  E: () => togglePanel("engine"),
};

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  const act = (event.ctrlKey || event.metaKey) && event.shiftKey && SHORTCUTS[event.key.toUpperCase()];
  if (!act) return;
  event.preventDefault();
  act();
});
for (const name of ["engine", "history"]) {
  document.body.classList.toggle(`with-${name}`, remembered(`with-${name}`, true));
  find(`${name}-button`).addEventListener("click", () => togglePanel(name));
}
isWide.addEventListener("change", showPanels);
addEventListener("show-engine", () => togglePanel("engine", true));
addEventListener("back", showModels); // the server answers again
find("model").addEventListener("change", showOthers);
find("key-button").addEventListener("click", openKeyDialog);
find("help-button").addEventListener("click", () => find("help-dialog").showModal());
find("key-dialog").addEventListener("close", () => {
  if (find("key-dialog").returnValue !== "save") return;
  setKeys(find("key").value.trim(), find("admin-key").value.trim());
  showModels();
  dispatchEvent(new Event("key"));
});
find("theme").addEventListener("click", switchTheme);
showTheme(remembered("theme", ""));
showPanels();
startSettings();
startChat();
startHistory();
startEngine();
startServed();
showModels();
