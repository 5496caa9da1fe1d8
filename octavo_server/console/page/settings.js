// The settings of a request, which the browser keeps, and presets of them.
import { button, find, remember, remembered } from "./elements.js";
import { answeringModels } from "./models.js";
import { startSchemaEditor } from "./schema_editor.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const TEXTS = ["system", "schema", "tools", "effort"];
const FIELDS = [...TEXTS, ...NUMBERS];
let presets = remembered("presets", []);

export function startSettings() {
  fill(remembered("settings", {}));
  find("settings").addEventListener("input", () => {
    showSet();
    if (problem()) return;
    showProblem(null);
    remember("settings", values());
  });
  find("preset").addEventListener("change", () => {
    const chosen = presets.find((preset) => preset.name === find("preset").value);
    fill(chosen?.values ?? {});
    remember("settings", values());
    showProblem(null);
    find("schema").dispatchEvent(new Event("input", { bubbles: true }));
  });
  find("preset-name").addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would send the message
    savePreset();
  });
  find("preset-buttons").append(button("Save as preset", savePreset), button("Delete preset", deletePreset, { id: "preset-delete" }));
  showPresets("");
  startSchemaEditor();
}

function values() {
  return { ...Object.fromEntries(FIELDS.map((id) => [id, find(id).value])), probabilities: find("probabilities").checked };
}

function fill(kept) {
  for (const id of FIELDS) find(id).value = typeof kept[id] === "string" ? kept[id] : "";
  find("probabilities").checked = kept.probabilities === true;
  showSet();
}

// Says beside the title which settings differ from the model's own: they outlive the page, and may be folded.
function showSet() {
  const set = FIELDS.filter((id) => find(id).value.trim()).map((id) => {
    const name = labelOf(id);
    return NUMBERS.includes(id) || id === "effort" ? `${name} ${find(id).value}` : name;
  });
  if (find("probabilities").checked) set.push("Token probabilities");
  find("settings-set").textContent = set.length ? `: ${set.join(", ")}` : "";
}

function showPresets(name) {
  find("preset").replaceChildren(new Option("the model's own settings", ""), ...presets.map((preset) => new Option(preset.name, preset.name)));
  find("preset").value = name;
  find("preset-delete").disabled = !presets.length;
}

function savePreset() {
  const name = find("preset-name").value.trim() || find("preset").value;
  if (!name) {
    showProblem({ id: "preset-name", text: "A preset needs a name." });
    return;
  }
  presets = [...presets.filter((preset) => preset.name !== name), { name, values: values() }];
  remember("presets", presets);
  find("preset-name").value = "";
  showPresets(name);
}

function deletePreset() {
  presets = presets.filter((preset) => preset.name !== find("preset").value);
  remember("presets", presets);
  showPresets("");
}

const labelOf = (id) => find(id).closest("label").querySelector("span").textContent;

function wrongNumber(id) {
  const node = find(id);
  const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = node.validity;
  if (badInput) return `${labelOf(id)} must be a number.`;
  const range = [node.min && `at least ${node.min}`, node.max && `at most ${node.max}`].filter(Boolean).join(" and ");
  if (rangeUnderflow || rangeOverflow) return `${labelOf(id)} must be ${range}.`;
  return stepMismatch && node.step === "1" ? `${labelOf(id)} must be a whole number.` : "";
}

function wrongJson(id) {
  const text = find(id).value.trim();
  if (!text) return "";
  try {
    const value = JSON.parse(text);
    if (id === "tools") return Array.isArray(value) ? "" : `${labelOf(id)}: it must be a list.`;
    return value !== null && typeof value === "object" && !Array.isArray(value) ? "" : `${labelOf(id)}: it must be an object.`;
  } catch (error) {
    return `${labelOf(id)}: ${error.message}`;
  }
}

// The first field with a value that cannot be sent, and what is wrong; undefined if all can.
function problem() {
  const found = [...NUMBERS.map((id) => ({ id, text: wrongNumber(id) })), ...["schema", "tools"].map((id) => ({ id, text: wrongJson(id) }))];
  return found.find(({ text }) => text);
}

function showProblem(found) {
  for (const id of [...FIELDS, "preset-name"]) find(id).removeAttribute("aria-invalid");
  find("settings-problem").textContent = found?.text ?? "";
  if (!found) return;
  find("settings").open = true;
  find(found.id).setAttribute("aria-invalid", "true");
  find(found.id).focus();
}

// The settings of the next request, or null, after saying which field is wrong.
export function requestSettings() {
  const wrong = problem();
  showProblem(wrong);
  if (wrong) return null;
  const number = (id) => (find(id).value.trim() === "" ? undefined : Number(find(id).value));
  const json = (id) => (find(id).value.trim() ? JSON.parse(find(id).value) : undefined);
  const schema = json("schema");
  const wantsProbabilities = find("probabilities").checked;
  return {
    models: answeringModels(),
    system: find("system").value.trim(),
    fields: {
      ...Object.fromEntries(NUMBERS.map((id) => [id, number(id)])),
      reasoning_effort: find("effort").value || undefined,
      logprobs: wantsProbabilities || undefined,
      top_logprobs: wantsProbabilities ? 5 : undefined,
      tools: json("tools"),
      response_format: schema && { type: "json_schema", json_schema: { name: "answer", strict: true, schema } },
    },
  };
}
