// The live view of the engine: /stats/live, and timelines of requests.
import { element, find, shown } from "./elements.js";
import { ask, events } from "./server.js";

const KEPT = 240;
const [FREE, CACHED, SHARED] = [-2, -1, 0];
const rates = [];
let last = null;
let shownOwners = [];
let shownPrefixes = "";
let controller = null;
let isAway = false;

export function startEngine() {
  watch();
  addEventListener("key", () => controller?.abort());
  addEventListener("theme", draw);
  addEventListener("resize", draw);
  find("explain").addEventListener("submit", (event) => {
    event.preventDefault();
    if (find("explain-id").value.trim()) showTimeline(find("explain-id").value.trim());
  });
}

// Watches for ever; a page in the background does not.
async function watch() {
  for (;;) {
    if (document.hidden) await new Promise((go) => document.addEventListener("visibilitychange", go, { once: true }));
    controller = new AbortController();
    const leave = () => document.hidden && controller.abort();
    document.addEventListener("visibilitychange", leave);
    try {
      for await (const snapshot of events(await ask("/stats/live", undefined, controller.signal))) {
        if (isAway) dispatchEvent(new Event("back"));
        setAway(false);
        take(snapshot);
      }
      setAway(true);
      shown(find("state"), "the engine is not ready", "bad");
    } catch (error) {
      if (error.name !== "AbortError") {
        setAway(true);
        shown(find("state"), error.message, "bad");
      }
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
    await new Promise((go) => setTimeout(go, 1500));
  }
}

// What is shown is no longer how it is.
function setAway(value) {
  isAway = value;
  find("engine").classList.toggle("away", value);
}

function take(snapshot) {
  const before = last;
  shownOwners = before ? before.caches.flatMap((cache) => unpacked(cache.owners)) : [];
  last = snapshot;
  const seconds = before && snapshot.time - before.time;
  const isNext = before && seconds > 0 && seconds < 5 && snapshot.output_tokens >= before.output_tokens;
  const rate = (name) => (isNext ? (snapshot[name] - before[name]) / seconds : 0);
  rates.push(rate("output_tokens"));
  if (rates.length > KEPT) rates.shift();
  shown(find("state"), snapshot.live ? `${snapshot.live} live` : "idle", "good");
  const hits = snapshot.prefix_queries ? (100 * snapshot.prefix_hits) / snapshot.prefix_queries : 0;
  tiles([
    ["running", `${snapshot.running} / ${snapshot.max_running}`, "requests that the engine works on, of the most at once"],
    ["waiting", snapshot.waiting, "requests that are in no step yet"],
    ["output tokens/s", rates.at(-1).toFixed(0), "tokens written, all requests together"],
    ["prompt tokens/s", rate("prompt_tokens").toFixed(0), "tokens of prompts read, all requests together"],
    ["last step", `${(snapshot.step_seconds * 1000).toFixed(1)} ms`, "time of the last step: one pass through the model"],
    ["tokens in it", snapshot.step_tokens, "tokens that the last step computed"],
    ["mean TTFT", mean(before, snapshot, "time_to_first_token"), "time to first token: from a request's arrival"],
    ["mean ITL", mean(before, snapshot, "inter_token_latency"), "inter-token latency: time from one token of an answer to the next"],
    ["prefix hits", `${hits.toFixed(0)} %`, "share of prompt tokens that an earlier request had left in the cache"],
    ["preemptions", snapshot.preemptions, "times that a request lost its place in the cache to another"],
    ["restarts", snapshot.restarts, "times that the engine process was started again"],
  ]);
  table(snapshot);
  drawPrefixes();
  draw();
}

// The mean of what was observed since the snapshot before; of all time if that is nothing.
function mean(before, now, name) {
  const count = now[name].count - (before?.[name].count ?? 0);
  const total = now[name].sum - (before?.[name].sum ?? 0);
  const value = count > 0 ? total / count : now[name].count ? now[name].sum / now[name].count : null;
  return value === null ? "–" : `${(value * 1000).toFixed(1)} ms`;
}

function tiles(pairs) {
  const box = find("tiles");
  if (box.children.length !== pairs.length) {
    box.replaceChildren(...pairs.map(([name, , about]) => element("div", { class: "tile", title: about }, element("b"), element("span", {}, name))));
  }
  pairs.forEach(([, value], place) => { box.children[place].firstChild.textContent = value; });
}

function table(snapshot) {
  const rows = snapshot.requests.map((request) => {
    const progress = element("progress", { max: request.max_tokens, value: request.output, "aria-label": `Request ${request.id}` });
    const state = !request.running ? "waiting" : request.output ? "decode" : "prefill";
    const cells = [request.id, state, request.prompt, request.output].map((value) => element("td", {}, String(value)));
    return element("tr", {}, ...cells, element("td", {}, progress));
  });
  find("requests").replaceChildren(...rows);
  const hidden = snapshot.live - rows.length;
  find("request-text").textContent = hidden > 0 ? `the oldest ${rows.length} of ${snapshot.live}` : String(rows.length || "none");
}

// A canvas of the size that it is shown in, cleared.
function canvas(id) {
  const node = find(id);
  const ratio = devicePixelRatio || 1;
  const [width, height] = [node.clientWidth, node.clientHeight];
  node.width = width * ratio;
  node.height = height * ratio;
  const context = node.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw() {
  if (!last || !find("engine").clientWidth) return;
  drawRates();
  drawCaches();
}

function drawRates() {
  const { context, width, height } = canvas("rate");
  const top = Math.max(10, ...rates) * 1.15;
  const at = (place) => [(width * (place + KEPT - rates.length)) / (KEPT - 1), height - 4 - ((height - 20) * rates[place]) / top];
  context.beginPath();
  rates.forEach((_, place) => context.lineTo(...at(place)));
  context.strokeStyle = colour("--main");
  context.lineWidth = 1.5;
  context.stroke();
  context.fillStyle = colour("--soft");
  context.font = "11px system-ui";
  context.fillText(`peak ${Math.max(...rates).toFixed(0)}`, 6, 13);
}

// The caches, one below the other: a square for every so many blocks, in the colour of the request that holds them.
// Blocks that changed since the snapshot before have a frame.
function drawCaches() {
  const { size, total, used, cached } = last.blocks;
  find("cache-text").textContent = `${used} of ${total} blocks of ${size} tokens in use, ${cached} kept for reuse`;
  const owners = last.caches.flatMap((cache) => unpacked(cache.owners));
  const holders = new Set(owners.filter((owner) => owner > SHARED));
  find("cache").setAttribute("aria-label", `KV cache: ${used} blocks in use by ${holders.size} requests, ${cached} kept, of ${total}`);
  const { context, width, height } = canvas("cache");
  if (!owners.length) return;
  const columns = Math.ceil(Math.sqrt((owners.length * width) / height));
  const side = Math.min(width / columns, height / Math.ceil(owners.length / columns));
  const fixed = { [FREE]: colour("--free"), [CACHED]: colour("--cached"), [SHARED]: colour("--soft") };
  context.strokeStyle = colour("--text");
  owners.forEach((owner, place) => {
    const [x, y] = [(place % columns) * side, Math.floor(place / columns) * side];
    context.fillStyle = owner > SHARED ? `hsl(${(owner * 137) % 360} 55% 52%)` : fixed[owner];
    context.fillRect(x + 0.5, y + 0.5, side - 1, side - 1);
    if (shownOwners.length === owners.length && shownOwners[place] !== owner) context.strokeRect(x + 1, y + 1, side - 2, side - 2);
  });
}

// The owner of each cell, from pairs of an owner and a number of cells.
function unpacked(runs) {
  const owners = [];
  for (let place = 0; place < runs.length; place += 2) owners.push(...Array(runs[place + 1]).fill(runs[place]));
  return owners;
}

// The prefix trees: a bar for each chain of cached blocks, behind the one that it continues; the used part is filled.
function drawPrefixes() {
  const text = JSON.stringify(last.caches.map((cache) => cache.prefixes));
  if (text === shownPrefixes) return;
  shownPrefixes = text;
  const box = find("prefixes");
  box.replaceChildren();
  for (const { prefixes, has_more: hasMore } of last.caches) {
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
  const count = last.caches.reduce((sum, cache) => sum + cache.prefixes.length, 0);
  find("prefix-text").textContent = count ? `${count} ${count === 1 ? "chain" : "chains"} of blocks; the blue part is in use` : "empty";
}

export async function showTimeline(id) {
  const box = find("timeline");
  find("explain-id").value = id;
  try {
    const { choices } = await (await ask(`/v1/requests/${encodeURIComponent(id)}/timeline`)).json();
    box.replaceChildren(...choices.flatMap(timeline));
  } catch (error) {
    box.replaceChildren(element("p", { class: "error" }, error.message));
  }
  dispatchEvent(new Event("show-engine"));
  box.scrollIntoView({ block: "nearest" });
}

function timeline(report) {
  const events = report.events;
  const phases = events.slice(1).map((event, place) => {
    const before = events[place];
    const isWaiting = before.event === "arrived" || before.event === "preempted";
    const name = isWaiting ? "waiting" : event.event === "chunk" ? "prefill" : "decode";
    const part = element("div", { class: name, title: `${name} ${((event.at - before.at) * 1000).toFixed(1)} ms, then ${event.event}` });
    part.style.flex = String(event.at - before.at);
    return part;
  });
  const text = Object.entries(report.seconds).map(([name, value]) => `${name} ${(value * 1000).toFixed(1)} ms`).join(" · ");
  const rows = events.map((event) => {
    const { at, event: kind, step, ...rest } = event;
    const details = Object.entries(rest).map(([name, value]) => `${name} ${value}`).join(", ");
    const cells = [`${(at * 1000).toFixed(1)} ms`, kind, step, details].map((value) => element("td", {}, String(value)));
    return element("tr", {}, ...cells);
  });
  const head = ["at", "event", "step", "details"].map((name) => element("th", {}, name));
  return [
    element("h2", {}, `Request ${report.request}: ${report.status}`),
    element("p", { class: "about" }, `${report.prompt_tokens} prompt tokens, ${report.cached_tokens ?? 0} of them cached, ${report.output_tokens ?? "?"} of output; ${text}`),
    element("div", { class: "phases", role: "img", "aria-label": text }, ...phases),
    element("div", { class: "scroll", tabindex: "0" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))),
  ];
}
