// A small part of Markdown as DOM nodes: code blocks, headings, lists, bold, italics and inline code.
// Nothing is parsed as HTML, and there are no links and no images.
import { element } from "./server.js";

const INLINE = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)/;
const ITEM = /^\s*(?:[-*+]|(\d+)[.)])\s+(.*)$/;

/** The nodes of a text. */
export function rendered(text) {
  const nodes = [];
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) nodes.push(element("p", {}, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  for (let index = 0; index < lines.length; index += 1) {
    const line = lines[index];
    if (line.trimStart().startsWith("```")) {
      flush();
      const code = [];
      for (index += 1; index < lines.length && !lines[index].trimStart().startsWith("```"); index += 1) code.push(lines[index]);
      nodes.push(element("pre", { tabindex: "0" }, element("code", {}, code.join("\n"))));
    } else if (ITEM.test(line)) {
      flush();
      const isNumbered = ITEM.exec(line)[1] !== undefined;
      const list = element(isNumbered ? "ol" : "ul", isNumbered ? { start: ITEM.exec(line)[1] } : {});
      for (; index < lines.length; index += 1) {
        const item = ITEM.exec(lines[index]);
        if (!item || (item[1] !== undefined) !== isNumbered) break;
        list.append(element("li", {}, ...inline(item[2])));
      }
      index -= 1;
      nodes.push(list);
    } else if (/^#{1,6}\s/.test(line)) {
      flush();
      nodes.push(element("p", { class: "heading" }, ...inline(line.replace(/^#+\s+/, ""))));
    } else if (line.trim() === "") {
      flush();
    } else {
      paragraph.push(line);
    }
  }
  flush();
  return nodes;
}

function inline(text) {
  const nodes = [];
  while (text) {
    const found = INLINE.exec(text);
    if (!found) break;
    if (found.index) nodes.push(text.slice(0, found.index));
    const [whole, code, bold] = found;
    if (code) nodes.push(element("code", {}, code.slice(1, -1)));
    else if (bold) nodes.push(element("strong", {}, bold.slice(2, -2)));
    else nodes.push(element("em", {}, whole.slice(1, -1)));
    text = text.slice(found.index + whole.length);
  }
  if (text) nodes.push(text);
  return nodes;
}
