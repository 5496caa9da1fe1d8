// The endpoints and their fields, from /openapi.json.
import { element, shown } from "./elements.js";
import { ask } from "./server.js";

// A type in a few words.
function kind(schema, schemas) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return [...new Set(schema.anyOf.map((each) => kind(each, schemas)))].filter((each) => each !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.type === "array") return `list of ${schema.items ? kind(schema.items, schemas) : "anything"}`;
  return schema.type ?? "anything";
}

function fields(schema, schemas) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const isNeeded = schema.required?.includes(name);
    const value = isNeeded ? "required" : field.default === undefined ? "" : JSON.stringify(field.default);
    const cells = [element("code", {}, name), kind(field, schemas), value, field.description ?? ""];
    return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
  });
  const head = ["field", "type", "default", "description"].map((name) => element("th", {}, name));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

function operation(path, method, about, schemas) {
  const reference = about.requestBody?.content?.["application/json"]?.schema?.$ref;
  const title = [element("code", {}, `${method.toUpperCase()} ${path}`), ` ${about.summary}`];
  if (!reference) return element("p", { class: "operation" }, ...title);
  const schema = schemas[reference.split("/").at(-1)];
  const text = schema.description ? [element("p", {}, schema.description)] : [];
  return element("details", { class: "operation" }, element("summary", {}, ...title), ...text, fields(schema, schemas));
}

try {
  const document_ = await (await ask("/openapi.json")).json();
  const schemas = document_.components.schemas;
  const found = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, about]) => operation(path, method, about, schemas)));
  document.getElementById("operations").replaceChildren(...found);
} catch (error) {
  shown(document.getElementById("state"), `${error.message} Give the API key in the console first.`, "bad");
}
