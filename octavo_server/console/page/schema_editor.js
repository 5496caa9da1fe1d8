// A table of fields for a JSON schema, for those who write none by hand: it and the text of the schema follow each other.
import { button, element, find } from "./elements.js";

const TYPES = {
  text: { type: "string" },
  number: { type: "number" },
  "whole number": { type: "integer" },
  "yes or no": { type: "boolean" },
  "list of texts": { type: "array", items: { type: "string" } },
  "list of numbers": { type: "array", items: { type: "number" } },
};
const CHOICE = "one of";

export function startSchemaEditor() {
  find("add-field").addEventListener("click", () => {
    addRow("", "text", "");
    find("schema-rows").lastChild.querySelector("input").focus();
  });
  find("schema").addEventListener("input", readText);
  readText();
}

function addRow(name, type, choices) {
  const nameBox = element("input", { "aria-label": "Name of the field", placeholder: "name", value: name });
  const typeBox = element("select", { "aria-label": "Type of the field" });
  typeBox.append(...[...Object.keys(TYPES), CHOICE].map((each) => new Option(each, each)));
  typeBox.value = type;
  const choiceBox = element("input", { "aria-label": "Values, with commas between", placeholder: "red, green, blue", value: choices });
  const row = element("div", { class: "row schema-row" }, nameBox, typeBox, choiceBox, button("Remove", () => {
    row.remove();
    writeText();
  }, { "aria-label": "Remove the field" }));
  const changed = () => {
    choiceBox.hidden = typeBox.value !== CHOICE;
    writeText();
  };
  choiceBox.hidden = type !== CHOICE;
  row.addEventListener("input", (event) => {
    event.stopPropagation(); // the text that is written tells of it
    changed();
  });
  find("schema-rows").append(row);
}

function writeText() {
  const properties = {};
  for (const row of find("schema-rows").children) {
    const [name, type, choices] = [...row.children].map((node) => node.value?.trim());
    if (!name) continue;
    properties[name] = type === CHOICE ? { enum: choices.split(",").map((each) => each.trim()).filter(Boolean) } : TYPES[type];
  }
  const names = Object.keys(properties);
  find("schema").value = names.length
    ? JSON.stringify({ type: "object", properties, required: names, additionalProperties: false }, null, 1) : "";
  find("settings").dispatchEvent(new Event("input"));
}

// Rows for the text, if it is what such rows would write; else none, and the text alone counts.
function readText() {
  let schema = null;
  try {
    schema = JSON.parse(find("schema").value || "{}");
  } catch { /* not JSON yet */ }
  const rows = Object.entries(schema?.properties ?? {}).map(([name, value]) => {
    if (Array.isArray(value?.enum)) return [name, CHOICE, value.enum.join(", ")];
    const type = Object.keys(TYPES).find((each) => JSON.stringify(TYPES[each]) === JSON.stringify(value));
    return type && [name, type, ""];
  });
  const isKnown = schema !== null && rows.every(Boolean) && Object.keys(schema).every((key) => ["type", "properties", "required", "additionalProperties"].includes(key));
  find("schema-rows").replaceChildren();
  if (isKnown) for (const row of rows) addRow(...row);
  find("add-field").disabled = !isKnown;
}
