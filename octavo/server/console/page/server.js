// Requests to the server that served this page, which may be below a path of a proxy.
let key = sessionStorage.getItem("octavo-key") ?? "";

export function setKey(value) {
  key = value;
  if (value) sessionStorage.setItem("octavo-key", value);
  else sessionStorage.removeItem("octavo-key");
}

// The response; throws an error with the server's message, and the status, for any that is not OK.
export async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    options.method = "POST";
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await fetch(new URL(path.slice(1), new URL(".", location.href)), options);
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error } = await response.json();
    message = error.message ?? error;
  } catch { /* not JSON */ }
  throw Object.assign(new Error(message), { status: response.status });
}

// The data of each server-sent event of a response.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let end;
      while ((end = text.indexOf("\n\n")) >= 0) {
        const lines = text.slice(0, end).split("\n");
        text = text.slice(end + 2);
        const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Sets the text of a status, and its class: "good", "bad" or none.
export function shown(node, text, kind = "") {
  node.textContent = text;
  node.className = `state ${kind}`;
}

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, value);
  node.append(...children);
  return node;
}
