// The engine's last steps: a column for each, as high as its tokens are many, and what the chosen one computed, and why.
// An engine of the backend toy can be held, and let go on step by step.
import { Moments, canvas, colour, colourOf } from "./drawing.js";
import { button, element, find } from "./elements.js";
import { modelQuery } from "./models.js";
import { ask } from "./server.js";

const KEPT = 120;
let steps = null;
let budget = 0;
const owners = new Map(); // of requests: the names of their API keys

export function startSteps() {
  steps = new Moments("step-choice", KEPT, drawSteps);
  find("pace").append(
    button("Hold", () => setPace(0), { id: "hold" }),
    button("One step", () => setPace(1), { id: "one-step" }),
    button("Ten steps", () => setPace(10)),
    button("Go on", () => setPace()));
}

export function forgetSteps() {
  steps.clear();
  owners.clear();
}

// Lets the engine compute so many steps and then hold, or go on.
async function setPace(count) {
  const query = [modelQuery().slice(1), count === undefined ? "" : `steps=${count}`].filter(Boolean).join("&");
  try {
    await ask(`/stats/pace?${query}`, {});
    find("pace-text").textContent = "";
  } catch (error) {
    find("pace-text").textContent = error.message;
  }
}

export function takeSteps(snapshot) {
  budget = snapshot.max_step_tokens;
  find("pace").hidden = !snapshot.can_hold;
  find("hold").setAttribute("aria-pressed", String(snapshot.is_held));
  if (snapshot.is_held) find("pace-text").textContent = "Held: no step is computed until you say so.";
  else if (snapshot.can_hold) find("pace-text").textContent = "";
  for (const { id, owner } of snapshot.requests) owners.set(id, owner);
  const isNew = snapshot.last_steps.length > 0;
  steps.add(...snapshot.last_steps);
  if (isNew) drawOwners();
}

// Each API key's share of the tokens of the steps that are kept, where there are several keys.
function drawOwners() {
  const tokens = new Map();
  const seen = new Set();
  for (const share of steps.kept.flatMap((each) => each.shares)) {
    seen.add(share[0]);
    const owner = owners.get(share[0]);
    if (owner === undefined) continue; // it began and ended between two snapshots
    tokens.set(owner, (tokens.get(owner) ?? 0) + tokensOf(share));
  }
  for (const request of owners.keys()) if (!seen.has(request)) owners.delete(request);
  find("owners").hidden = tokens.size < 2;
  const all = [...tokens.values()].reduce((sum, each) => sum + each, 0);
  const rows = [...tokens].sort(([, one], [, other]) => other - one).map(([owner, count]) => {
    const bar = element("progress", { max: String(all), value: String(count), "aria-label": `Share of ${owner || "no key"}` });
    const cells = [owner || "no key", String(count), `${((100 * count) / all).toFixed(0)} %`].map((cell) => element("td", {}, cell));
    return element("tr", {}, ...cells, element("td", {}, bar));
  });
  find("owner-shares").replaceChildren(...rows);
}

export function drawSteps() {
  const { kept, place, chosen } = steps;
  const { context, width, height } = canvas("steps");
  const step = width / KEPT;
  const top = Math.max(8, ...kept.map((each) => each.tokens));
  kept.forEach((each, number) => {
    const x = width - (kept.length - number) * step;
    let bottom = height;
    const draw = (tokens, fill) => {
      const part = ((height - 4) * tokens) / top;
      context.fillStyle = fill;
      context.fillRect(x, bottom - part, Math.max(1, step - 1), part);
      bottom -= part;
    };
    for (const [request, prompt, , output, drafts, accepted] of each.shares) {
      if (prompt) draw(prompt, colourOf(request));
      if (drafts) {
        draw(1, colourOf(request));
        draw(accepted, colour("--good"));
        draw(drafts - accepted, colour("--bad"));
      } else if (output && !prompt) draw(1, colourOf(request));
    }
    if (number === place) {
      context.strokeStyle = colour("--text");
      context.strokeRect(x - 0.5, 0.5, Math.max(2, step), height - 1);
    }
  });
  if (chosen) describe(chosen);
}

function describe(step) {
  const { number, tokens, seconds, waiting, shares, others } = step;
  const text = `Step ${number}: ${tokens} of at most ${budget} tokens, ${shares.length + others} requests, ${(seconds * 1000).toFixed(1)} ms, ${waiting} waiting`;
  find("step-text").textContent = text;
  find("step-choice").setAttribute("aria-valuetext", text);
  const rows = shares.map((share) => {
    const swatch = element("i", { class: "swatch" });
    swatch.style.background = colourOf(share[0]);
    return element("tr", {}, element("td", {}, swatch, ` ${share[0]}`), element("td", {}, String(tokensOf(share))), element("td", {}, ...reasonOf(share)));
  });
  if (others) rows.push(element("tr", {}, element("td", {}, "…"), element("td", {}, ""), element("td", {}, `${others} further requests`)));
  find("step-shares").replaceChildren(...rows);
}

const tokensOf = ([, prompt, , output, drafts]) => prompt + (drafts || (output && !prompt) ? 1 + drafts : 0);

// Why a request has this share of the step.
function reasonOf([, prompt, start, output, drafts, accepted, cached, end]) {
  const parts = [];
  if (cached) parts.push(`admitted, ${cached} tokens found in the prefix cache`);
  if (prompt) {
    const rest = output ? "to its end, so that a first token is sampled" : "a part: the rest waits for later steps";
    parts.push(`prompt from token ${start}, ${rest}`);
  } else if (drafts) {
    const marks = element("span", { class: "drafts", title: `${accepted} of ${drafts} drafts accepted` },
      element("b", {}, "✓".repeat(accepted)), element("s", {}, "✗".repeat(drafts - accepted)));
    return [`${drafts} drafts checked at once, ${accepted} accepted `, marks, ended(end)];
  } else if (output) parts.push("its next token");
  return [parts.join("; "), ended(end)];
}

function ended(reason) {
  if (!reason) return "";
  return reason === "preempted" ? " preempted: its blocks went to another, it is computed again" : ` and ends: ${reason}`;
}
