// Where the time of a request went, as a drawing and a table.
import { element, find } from "./elements.js";
import { ask } from "./server.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [600, 76];
const BAR = { y: 24, height: 26 };

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

function shape(name, attributes, ...children) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [attribute, value] of Object.entries(attributes)) node.setAttribute(attribute, String(value));
  node.append(...children);
  return node;
}

const duration = (seconds) => (seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`);

// The phase that ends with an event, by the event before it.
function phaseOf(before, event) {
  if (before.event === "arrived" || before.event === "preempted") return "waiting";
  return event.event === "chunk" ? "prefill" : "decode";
}

// A bar of the phases over time, with a scale below and marks above it.
function drawing(events, label) {
  const end = events.at(-1).at || 1e-6;
  const x = (at) => (WIDTH * at) / end;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "drawing", role: "img", "aria-label": label });
  events.slice(1).forEach((event, place) => {
    const before = events[place];
    const name = phaseOf(before, event);
    const title = shape("title", {}, `${name} ${duration(event.at - before.at)}, then ${event.event}${event.tokens ? ` of ${event.tokens} tokens` : ""}`);
    const width = Math.max(1, x(event.at) - x(before.at) - 1);
    svg.append(shape("rect", { x: x(before.at), y: BAR.y, width, height: BAR.height, class: name }, title));
    if (width > 60) svg.append(shape("text", { x: x(before.at) + width / 2, y: BAR.y + 17, class: `within ${name}` }, name));
  });
  for (const { at, event } of events.filter((each) => ["preempted", "fault", "ended"].includes(each.event))) {
    svg.append(shape("path", { d: `M${x(at)} ${BAR.y}v-8`, class: event }));
    svg.append(shape("text", { x: x(at), y: 12, class: x(at) > WIDTH / 2 ? "right" : "left" }, event));
  }
  for (let tick = 0; tick <= 4; tick += 1) {
    const place = (WIDTH * tick) / 4;
    svg.append(shape("path", { d: `M${place} ${BAR.y + BAR.height}v5`, class: "tick" }));
    svg.append(shape("text", { x: place, y: HEIGHT - 8, class: ["left", "", "", "", "right"][tick] }, duration((end * tick) / 4)));
  }
  return svg;
}

function timeline(report) {
  const { events, drafts } = report;
  const text = Object.entries(report.seconds).map(([name, value]) => `${name} ${duration(value)}`).join(" · ");
  const rows = events.map((event) => {
    const { at, event: kind, step, ...rest } = event;
    const details = Object.entries(rest).map(([name, value]) => `${name} ${value}`).join(", ");
    const cells = [duration(at), kind, step, details].map((value) => element("td", {}, String(value)));
    return element("tr", {}, ...cells);
  });
  const head = ["at", "event", "step", "details"].map((name) => element("th", {}, name));
  return [
    element("h2", {}, `Request ${report.request}: ${report.status}`),
    element("p", { class: "about" }, `${report.prompt_tokens} prompt tokens, ${report.cached_tokens ?? 0} of them cached, ${report.output_tokens ?? "?"} of output; ${text}`),
    drawing(events, text),
    ...(drafts ? [draftBar(drafts)] : []),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Events" },
      element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))),
  ];
}

function draftBar({ verified, accepted }) {
  const bar = element("div", { class: "draft-bar" }, element("i"));
  bar.firstChild.style.width = `${(100 * accepted) / verified}%`;
  return element("div", { class: "about" }, `${accepted} of ${verified} drafts accepted`, bar);
}
