// The live view of the engine: /stats/live.
import { drawCache, forgetCache, startCacheMap, takeCache } from "./cache_map.js";
import { canvas, colour } from "./drawing.js";
import { element, find, shown } from "./elements.js";
import { modelQuery } from "./models.js";
import { ask, events } from "./server.js";
import { drawSteps, forgetSteps, startSteps, takeSteps } from "./steps.js";
import { showTimeline } from "./timeline.js";

const KEPT = 240;
const rates = [];
let last = null;
let controller = null;
let isAway = false;

export function startEngine() {
  startCacheMap();
  startSteps();
  watch();
  addEventListener("key", () => controller?.abort());
  find("model").addEventListener("change", () => {
    forget();
    controller?.abort();
  });
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
      for await (const snapshot of events(await ask(`/stats/live${modelQuery()}`, undefined, controller.signal))) {
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

// Another model may have another engine.
function forget() {
  last = null;
  rates.length = 0;
  forgetCache();
  forgetSteps();
}

// What is shown is no longer how it is.
function setAway(value) {
  isAway = value;
  find("engine").classList.toggle("away", value);
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
  takeCache(snapshot);
  takeSteps(snapshot);
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

function draw() {
  if (!last || !find("engine").clientWidth) return;
  drawRates();
  drawCache();
  drawSteps();
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
