// What is served: models, adapters, and the use of each API key.
import { element, find } from "./elements.js";
import { ask, hasAdminKey } from "./server.js";

export function startServed() {
  find("server-facts").addEventListener("toggle", show);
  addEventListener("key", show);
}

async function show() {
  if (!find("server-facts").open) return;
  const parts = await Promise.all([
    table("/v1/models", ["model or adapter", "of", "context"], (model) => [model.id, model.parent ?? "", model.max_model_len ?? ""]),
    hasAdminKey()
      ? table("/admin/keys", ["API key", "requests", "tokens"], (key) => [key.name || "the key of the settings", key.num_requests, key.num_tokens])
      : element("p", { class: "about" }, "The use of each API key is shown with the admin key."),
  ]);
  find("served").replaceChildren(...parts);
}

async function table(path, head, cells) {
  try {
    const { data } = await (await ask(path)).json();
    const rows = data.map((each) => element("tr", {}, ...cells(each).map((cell) => element("td", {}, String(cell)))));
    return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head[0] },
      element("table", {}, element("thead", {}, element("tr", {}, ...head.map((name) => element("th", {}, name)))), element("tbody", {}, ...rows)));
  } catch (error) {
    return element("p", { class: "error" }, error.message);
  }
}
