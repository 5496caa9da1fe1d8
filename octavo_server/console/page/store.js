// Conversations kept in this browser, in IndexedDB, because pictures are too large for localStorage. Nothing is sent anywhere.
import { newId } from "./conversation.js";

const STORE = "conversations";
const own = newId(); // of this tab
const others = "BroadcastChannel" in globalThis ? new BroadcastChannel("octavo-conversations") : null;

let database; // once it is open; null if there is none
const opened = new Promise((resolve) => {
  let request;
  try {
    request = indexedDB.open("octavo", 1);
  } catch {
    resolve(null);
    return;
  }
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => resolve(null);
});

// Runs a request on the store; undefined where there is no store, as in some private windows.
async function ask(mode, make) {
  // Without a wait if it is open: a page that goes away waits for nothing.
  if (database === undefined) database = await opened;
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(STORE, mode);
    const request = make(transaction.objectStore(STORE));
    transaction.commit();
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(new Error(`The browser could not keep the conversation: ${transaction.error?.message ?? "no reason given"}`));
  });
}

export const isKept = async () => (await opened) !== null;

// All conversations of this browser by id, as objects that the page shows and changes.
export const conversations = new Map();

export async function load() {
  for (const each of (await ask("readonly", (store) => store.getAll())) ?? []) conversations.set(each.id, each);
}

// Keeps a conversation; throws an error if the browser does not.
export async function put(conversation) {
  conversations.set(conversation.id, conversation);
  await ask("readwrite", (store) => store.put(conversation));
  others?.postMessage({ from: own, id: conversation.id });
}

export async function remove(id) {
  conversations.delete(id);
  await ask("readwrite", (store) => store.delete(id));
  others?.postMessage({ from: own, id });
}

// Calls back when another tab has changed a conversation, with the conversation as it is now, undefined if it is gone, and
// as it was here.
export function watchOthers(changed) {
  others?.addEventListener("message", async ({ data: { from, id } }) => {
    if (from === own) return;
    const now = await ask("readonly", (store) => store.get(id));
    const before = conversations.get(id);
    if (now) conversations.set(id, now);
    else conversations.delete(id);
    changed(id, now, before);
  });
}
