// The live view of the engine: /stats/live, and timelines of requests.
import { ask, element, events, shown } from "./server.js";

const find = (id) => document.getElementById(id);
const KEPT = 240;
const MOST_CELLS = 1024;
const rates = [];
let last = null;
let controller = null;

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
      for await (const snapshot of events(await ask("/stats/live", undefined, controller.signal))) take(snapshot);
      shown(find("state"), "the engine is not ready", "bad");
    } catch (error) {
      if (error.name !== "AbortError") shown(find("state"), error.message, "bad");
    } finally {
      document.removeEventListener("visibilitychange", leave);
    }
    await new Promise((go) => setTimeout(go, 1500));
  }
}

function take(snapshot) {
  const before = last;
  last = snapshot;
  const seconds = before && snapshot.time - before.time;
  const isNext = before && seconds > 0 && seconds < 5 && snapshot.output_tokens >= before.output_tokens;
  const rate = (name) => (isNext ? (snapshot[name] - before[name]) / seconds : 0);
  rates.push(rate("output_tokens"));
  if (rates.length > KEPT) rates.shift();
  shown(find("state"), snapshot.live ? `${snapshot.live} live` : "idle", "good");
  const hits = snapshot.prefix_queries ? (100 * snapshot.prefix_hits) / snapshot.prefix_queries : 0;
  tiles([
    ["running", `${snapshot.running} / ${snapshot.max_running}`],
    ["waiting", snapshot.waiting],
    ["output tokens/s", rates.at(-1).toFixed(0)],
    ["prompt tokens/s", rate("prompt_tokens").toFixed(0)],
    ["last step", `${(snapshot.step_seconds * 1000).toFixed(1)} ms`],
    ["tokens in it", snapshot.step_tokens],
    ["mean TTFT", mean(before, snapshot, "time_to_first_token")],
    ["mean ITL", mean(before, snapshot, "inter_token_latency")],
    ["prefix hits", `${hits.toFixed(0)} %`],
    ["preemptions", snapshot.preemptions],
    ["restarts", snapshot.restarts],
  ]);
  table(snapshot);
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
    box.replaceChildren(...pairs.map(([name]) => element("div", { class: "tile" }, element("b"), element("span", {}, name))));
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
  drawCache();
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

// A square for every so many blocks: those of the requests, then cached ones, then free ones.
function drawCache() {
  const { size, total, used, cached } = last.blocks;
  find("cache-text").textContent = `${used} of ${total} blocks of ${size} tokens in use, ${cached} kept for reuse`;
  const { context, width, height } = canvas("cache");
  const cells = Math.max(1, Math.min(total, MOST_CELLS));
  const columns = Math.ceil(Math.sqrt((cells * width) / height));
  const side = Math.min(width / columns, height / Math.ceil(cells / columns));
  const each = total / cells;
  const runs = last.requests.filter((request) => request.running).map((request) => {
    const tokens = request.output ? request.prompt + request.output : request.computed;
    return [Math.ceil(tokens / size), `hsl(${(request.id * 137) % 360} 55% 52%)`];
  });
  const known = runs.reduce((sum, [count]) => sum + count, 0);
  // Requests that share blocks hold fewer than the sum of their lengths.
  const scale = known > used && known > 0 ? used / known : 1;
  const bars = runs.map(([count, fill]) => [count * scale, fill]);
  bars.push([Math.max(0, used - known), colour("--soft")], [cached, colour("--cached")]);
  let place = 0;
  let bar = 0;
  let until = bars[0]?.[0] ?? 0;
  for (; place < cells; place++) {
    while (bar < bars.length && (place + 0.5) * each >= until) until += bars[++bar]?.[0] ?? 0;
    context.fillStyle = bar < bars.length ? bars[bar][1] : colour("--free");
    context.fillRect((place % columns) * side + 0.5, Math.floor(place / columns) * side + 0.5, side - 1, side - 1);
  }
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
  document.querySelector('[data-panel="engine"]').click();
  box.scrollIntoView({ block: "nearest" });
}

function timeline(report) {
  const total = Object.values(report.seconds).reduce((sum, value) => sum + value, 0) || 1;
  const phases = Object.entries(report.seconds).map(([name, value]) => {
    const part = element("div", { class: name, title: `${name} ${(value * 1000).toFixed(1)} ms` });
    part.style.flex = String(value / total);
    return part;
  });
  const text = Object.entries(report.seconds).map(([name, value]) => `${name} ${(value * 1000).toFixed(1)} ms`).join(" · ");
  const rows = report.events.map((event) => {
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
