// A little Markdown, built of nodes: nothing that a model writes becomes HTML.
import { element } from "./server.js";

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*)/;

function inline(text) {
  return text.split(INLINE).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return element("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return element("strong", {}, part.slice(2, -2));
    return part;
  });
}

function item(line) {
  const found = /^\s*(?:[-*]|\d+[.)])\s+(.*)$/.exec(line);
  return found && found[1];
}

function paragraphs(text) {
  return text.split(/\n{2,}/).filter((part) => part.trim()).flatMap((part) => {
    const lines = part.split("\n");
    if (lines.every((line) => item(line) !== null)) {
      const kind = /^\s*\d/.test(lines[0]) ? "ol" : "ul";
      return [element(kind, {}, ...lines.map((line) => element("li", {}, ...inline(item(line)))))];
    }
    const heading = lines.length === 1 && /^#{1,6}\s+(.*)$/.exec(part);
    return [heading ? element("p", {}, element("strong", {}, heading[1])) : element("p", {}, ...inline(part))];
  });
}

export function rendered(text) {
  return text.split(/^```.*$/m).flatMap((part, place) =>
    place % 2 ? [element("pre", { tabindex: "0" }, element("code", {}, part.replace(/^\n/, "")))] : paragraphs(part),
  );
}
