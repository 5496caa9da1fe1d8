// Pictures of the KV cache: who holds which block now or at a moment before, how much of it was held over time, the prefix tree, and the sessions.
import { Moments, canvas, colour, colourOf } from "./drawing.js";
import { element, find } from "./elements.js";

const [FREE, CACHED, SHARED] = [-2, -1, 0];
const KEPT = 240; // moments: two minutes
let moments = null;
let shownPrefixes = "";

export function startCacheMap() {
  moments = new Moments("cache-time", KEPT, drawCache);
}

export const forgetCache = () => moments.clear();

export function takeCache(snapshot) {
  const { time, blocks, caches } = snapshot;
  moments.add({ time, blocks, runs: caches.map((cache) => cache.owners), sizes: sizesOf(caches) });
  drawPrefixes(caches);
  listSessions(caches);
}

// The conversations that were used last, and how many of their tokens are still there.
function listSessions(caches) {
  const sessions = caches.flatMap((cache) => cache.sessions).sort((one, other) => one.idle_seconds - other.idle_seconds);
  const rows = sessions.map((session) => {
    const { id, owner, requests, tokens, cached_tokens: cached, pinned_tokens: pinned, idle_seconds: idle } = session;
    const cells = [owner ? `${owner}: ${id}` : id, requests, tokens, cached, pinned, `${idle.toFixed(0)} s`];
    return element("tr", {}, ...cells.map((value) => element("td", {}, String(value))));
  });
  find("sessions").replaceChildren(...rows);
  find("session-text").textContent = rows.length ? `the ${rows.length} used last` : "none";
}

// Cells of each kind.
function sizesOf(caches) {
  const sizes = { held: 0, shared: 0, kept: 0, free: 0 };
  for (const { owners } of caches) {
    for (let place = 0; place < owners.length; place += 2) {
      const kind = { [FREE]: "free", [CACHED]: "kept", [SHARED]: "shared" }[owners[place]] ?? "held";
      sizes[kind] += owners[place + 1];
    }
  }
  return sizes;
}

// The owner of each cell, from pairs of an owner and a number of cells.
function unpacked(runs) {
  const owners = [];
  for (let place = 0; place < runs.length; place += 2) owners.push(...Array(runs[place + 1]).fill(runs[place]));
  return owners;
}

// The caches, one below the other: a square for every so many blocks, in the colour of the request that holds them.
// Blocks that changed since the moment before have a frame.
export function drawCache() {
  const { chosen, place, kept } = moments;
  if (!chosen) return;
  const { size, total, used, cached } = chosen.blocks;
  const ago = kept.at(-1).time - chosen.time;
  find("cache-text").textContent = `${used} of ${total} blocks of ${size} tokens in use, ${cached} kept for reuse${ago > 0.1 ? `, ${ago.toFixed(1)} s ago` : ""}`;
  find("cache-time").setAttribute("aria-valuetext", ago > 0.1 ? `${ago.toFixed(1)} seconds ago` : "now");
  const owners = chosen.runs.flatMap(unpacked);
  const before = kept[place - 1]?.runs.flatMap(unpacked) ?? [];
  const holders = new Set(owners.filter((owner) => owner > SHARED));
  find("cache").setAttribute("aria-label", `KV cache: ${used} blocks in use by ${holders.size} requests, ${cached} kept, of ${total}`);
  const { context, width, height } = canvas("cache");
  if (owners.length) {
    const columns = Math.ceil(Math.sqrt((owners.length * width) / height));
    const side = Math.min(width / columns, height / Math.ceil(owners.length / columns));
    const fixed = { [FREE]: colour("--free"), [CACHED]: colour("--cached"), [SHARED]: colour("--soft") };
    context.strokeStyle = colour("--text");
    owners.forEach((owner, cell) => {
      const [x, y] = [(cell % columns) * side, Math.floor(cell / columns) * side];
      context.fillStyle = owner > SHARED ? colourOf(owner) : fixed[owner];
      context.fillRect(x + 0.5, y + 0.5, side - 1, side - 1);
      if (before.length === owners.length && before[cell] !== owner) context.strokeRect(x + 1, y + 1, side - 2, side - 2);
    });
  }
  drawOverTime();
}

// How many blocks each kind had, one above the other; a line is at the chosen moment.
function drawOverTime() {
  const { context, width, height } = canvas("cache-history");
  const { kept, place } = moments;
  const colours = { held: colour("--main"), shared: colour("--soft"), kept: colour("--cached") };
  const step = width / KEPT;
  kept.forEach(({ sizes }, number) => {
    const total = sizes.held + sizes.shared + sizes.kept + sizes.free || 1;
    let bottom = height;
    for (const kind of ["held", "shared", "kept"]) {
      const part = (height * sizes[kind]) / total;
      context.fillStyle = colours[kind];
      context.fillRect(width - (kept.length - number) * step, bottom - part, Math.ceil(step), part);
      bottom -= part;
    }
  });
  context.fillStyle = colour("--text");
  context.fillRect(width - (kept.length - place) * step, 0, 1, height);
}

// The prefix trees: a bar for each chain of cached blocks, behind the one that it continues; the used part is filled.
function drawPrefixes(caches) {
  const text = JSON.stringify(caches.map((cache) => cache.prefixes));
  if (text === shownPrefixes) return;
  shownPrefixes = text;
  const box = find("prefixes");
  box.replaceChildren();
  for (const { prefixes, has_more: hasMore } of caches) {
    const branches = prefixes.map(({ blocks, held }) => {
      const used = element("i");
      used.style.width = `${(100 * held) / blocks}%`;
      const bar = element("div", { class: "chain", title: `${blocks} blocks, ${held} in use` }, used);
      bar.style.width = `${Math.min(12, 0.6 + 0.3 * blocks)}rem`;
      return element("div", { class: "branch" }, bar, element("div"));
    });
    prefixes.forEach(({ parent }, place) => (parent < 0 ? box : branches[parent].lastChild).append(branches[place]));
    if (hasMore) box.append("…");
  }
  const count = caches.reduce((sum, cache) => sum + cache.prefixes.length, 0);
  find("prefix-text").textContent = count ? `${count} ${count === 1 ? "chain" : "chains"} of blocks; the blue part is in use` : "empty";
}
