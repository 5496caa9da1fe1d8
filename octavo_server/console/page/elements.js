// Small helpers for DOM nodes, and for what the browser does for the page: the clipboard, files to save.

export const find = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
  node.append(...children);
  return node;
}

export function button(text, act, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", act);
  return node;
}

// Says something to screen readers.
export function announce(text) {
  find("announcer").textContent = text;
}

// Sets the text of a status, and its class: "good", "bad" or none.
export function shown(node, text, kind = "") {
  node.textContent = text;
  node.className = `state ${kind}`;
}

// The clipboard's own interface is there on local and HTTPS pages only.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = element("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (!isDone) throw new Error("The browser did not let the page copy.");
  return undefined;
}

export function copyButton(label, text) {
  const node = button("Copy", async () => {
    let said = "Copied";
    try {
      await copy(text());
    } catch {
      said = "Not copied";
    }
    show(said, said);
    announce(said);
    setTimeout(() => show("Copy", label), 1500);
  });
  const show = (shownText, name) => {
    node.textContent = shownText;
    node.setAttribute("aria-label", name);
  };
  show("Copy", label);
  return node;
}

export function save(name, text, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

// The value kept under a name in this browser, or what is given.
export function remembered(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`octavo-${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`octavo-${name}`, JSON.stringify(value));
  } catch { /* the browser keeps nothing: the page works on without */ }
}
