// Requests to the server that served this page, which may be below a path of a proxy.
const KEY = "octavo-key";
const ADMIN_KEY = "octavo-admin-key";
// The admin key is for what reports on all keys; it is not one to chat with.
const ADMIN_PATHS = /^\/(stats|admin\/|v1\/requests\/)/;

export function setKeys(own, admin) {
  sessionStorage.setItem(KEY, own);
  sessionStorage.setItem(ADMIN_KEY, admin);
}

export const hasAdminKey = () => !!sessionStorage.getItem(ADMIN_KEY);

// The response; throws an error with the server's message, and the status, for any that is not OK.
export async function ask(path, body, signal) {
  const key = (ADMIN_PATHS.test(path) && sessionStorage.getItem(ADMIN_KEY)) || sessionStorage.getItem(KEY);
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal };
  if (body !== undefined) {
    options.method = "POST";
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await reached(() => fetch(new URL(path.slice(1), new URL(".", location.href)), options));
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error } = await response.json();
    message = error.message ?? error;
  } catch { /* not JSON */ }
  throw Object.assign(new Error(message), { status: response.status });
}

// Browsers say "Failed to fetch", "network error" and the like, each its own words, for a server that is not there.
async function reached(act) {
  try {
    return await act();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new Error(`The server at ${location.host} does not answer. Is it running?`), { isGone: true });
  }
}

// The data of each server-sent event of a response.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reached(() => reader.read());
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
