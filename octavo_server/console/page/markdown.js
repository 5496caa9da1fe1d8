// Markdown as DOM nodes, by marked; code is coloured by highlight.js, formulas are set by KaTeX, and whatever came out as HTML
// goes through DOMPurify. HTML in a text is shown as text, and pictures of other hosts as links: nothing is fetched from elsewhere.
import { Marked } from "./vendor/marked/marked.esm.js";
import "./vendor/dompurify/purify.min.js";
import hljs from "./vendor/highlight/core.min.js";
import { copyButton, element } from "./elements.js";

const { DOMPurify } = globalThis;
const LANGUAGES = {
  bash: "sh shell zsh console shellsession", c: "h", cpp: "c++ cc cxx hpp cuda cu", css: "", diff: "patch", go: "golang", java: "",
  javascript: "js jsx mjs", json: "jsonc json5", python: "py python3 pycon", rust: "rs", sql: "", typescript: "ts tsx", xml: "html svg", yaml: "yml",
};
const LANGUAGE_OF = new Map(Object.entries(LANGUAGES).flatMap(([name, others]) => `${name} ${others}`.trim().split(" ").map((each) => [each, name])));
const MOST_COLOURED = 100_000; // characters of a block of code
const CHUNK = 40; // blocks; the browser lays out a chunk only where it is seen
const CLEAN = {
  RETURN_DOM_FRAGMENT: true,
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "hr", "li", "ol", "p", "pre", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
};

const escaped = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

function formula(name, level, start, patterns) {
  return {
    name, level,
    start: (source) => source.match(start)?.index,
    tokenizer(source) {
      for (const [pattern, isDisplayed] of patterns) {
        const found = pattern.exec(source);
        if (found) return { type: name, raw: found[0], text: found[1].trim(), isDisplayed };
      }
      return undefined;
    },
    renderer: ({ text, isDisplayed }) => `<span class="math${isDisplayed ? " display" : ""}">${escaped(text)}</span>`,
  };
}

const marked = new Marked({
  gfm: true,
  extensions: [
    formula("formulaBlock", "block", /\n {0,3}(?:\$\$|\\\[)/, [[/^ {0,3}\$\$([\s\S]+?)\$\$ *(?:\n|$)/, true], [/^ {0,3}\\\[([\s\S]+?)\\\] *(?:\n|$)/, true]]),
    formula("formula", "inline", /\$|\\[([]/, [
      [/^\$\$([^$]+?)\$\$/, true], [/^\\\[([\s\S]+?)\\\]/, true], [/^\\\(([\s\S]+?)\\\)/, false],
      // Not "$5 or $6": no space inside at either end, and no digit behind.
      [/^\$(?![\s$])((?:\\.|[^\\\n$])+?)(?<!\s)\$(?!\d)/, false],
    ]),
  ],
  renderer: {
    html: ({ text }) => escaped(text),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      return `<p class="heading level${depth}">${this.parser.parseInline(tokens)}</p>`;
    },
    code: ({ text, lang }) => `<pre><code class="${escaped((lang ?? "").trim().split(/\s/)[0])}">${escaped(text)}</code></pre>`,
  },
});

let katex; // a promise, once there is a formula

function loadKatex() {
  katex ??= new Promise((resolve) => {
    const at = (name) => new URL(`vendor/katex/${name}`, import.meta.url).href;
    const script = element("script", { src: at("katex.min.js") });
    script.addEventListener("load", () => resolve(globalThis.katex));
    script.addEventListener("error", () => { katex = undefined; });
    document.head.append(element("link", { rel: "stylesheet", href: at("katex.min.css") }), script);
  });
  return katex;
}

async function set(node) {
  const library = globalThis.katex ?? (await loadKatex());
  const options = { displayMode: node.classList.contains("display"), throwOnError: false, maxSize: 40, maxExpand: 500 };
  library.render(node.textContent, node, options);
}

async function coloured(code, language) {
  const text = code.textContent;
  if (!language || text.length > MOST_COLOURED) return;
  try {
    if (!hljs.getLanguage(language)) {
      hljs.registerLanguage(language, (await import(`./vendor/highlight/languages/${language}.min.js`)).default);
    }
    code.replaceChildren(DOMPurify.sanitize(hljs.highlight(text, { language, ignoreIllegals: true }).value, CLEAN));
  } catch { /* it stays as it is */ }
}

// A block of code, with its language and a button that copies it.
export function codeBlock(text, name = "", isColoured = true) {
  const code = element("code", {}, text);
  const head = element("div", { class: "code-head" }, element("span", {}, name), copyButton("Copy code", () => code.textContent));
  if (isColoured) coloured(code, LANGUAGE_OF.get(name.toLowerCase()));
  return element("div", { class: "code-block" }, head, element("pre", { tabindex: "0", "aria-label": name ? `Code in ${name}` : "Code" }, code));
}

// A text that is an object or a list in JSON, with line ends; null if it is none. Its numbers and strings stay to the letter.
export function jsonBlock(text) {
  if (!/^\s*[{[]/.test(text)) return null;
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  let depth = 0;
  const line = (change) => `\n${"  ".repeat(depth += change)}`;
  const shown = text.replace(/"(?:\\.|[^"\\])*"|\{\s*\}|\[\s*\]|[{}[\],:]|\s+/g, (part) => {
    if (part === "{" || part === "[") return part + line(1);
    if (part === "}" || part === "]") return line(-1) + part;
    if (part === ",") return part + line(0);
    if (part === ":") return ": ";
    return /^[{[\s]/.test(part) ? part.replace(/\s+/g, "") : part;
  });
  return codeBlock(shown, "json");
}

// The DOM nodes of some of marked's tokens. What is not finished yet is not coloured.
function nodesOf(tokens, isFinished) {
  const fragment = DOMPurify.sanitize(marked.parser(tokens), CLEAN);
  for (const link of fragment.querySelectorAll("a:not([href])")) link.replaceWith(...link.childNodes); // its address was unsafe
  for (const link of fragment.querySelectorAll("a")) {
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer");
  }
  for (const block of fragment.querySelectorAll("pre")) {
    const code = block.firstElementChild;
    block.replaceWith(codeBlock(code.textContent, code.className, isFinished));
  }
  for (const table of fragment.querySelectorAll("table")) {
    const box = element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  for (const node of fragment.querySelectorAll(".math")) set(node);
  return [...fragment.childNodes];
}

// A text that grows. What cannot change any more is left alone: a longer text costs no more than its last two blocks do, since
// the last one may still turn out to belong to the one before it.
export class GrowingText {
  constructor(box) {
    this.box = box;
    this.settled = 0; // characters whose nodes are final
    this.length = 0; // characters shown
    this.rest = []; // nodes of what is not settled
    this.code = null; // the text node of a block of code that is still open
  }

  show(source, isFinished) {
    const text = source.replace(/\r\n?/g, "\n");
    if (!this.length) this.box.replaceChildren();
    // A link's address may stand below it, so that only the whole text tells what it is.
    if (isFinished && /^ {0,3}\[[^\]]+\]:/m.test(text)) this.clear();
    const added = text.slice(this.length);
    if (this.code && !isFinished && !/[`~]/.test(text.slice(this.length - 3))) this.code.appendData(added);
    else if (added || isFinished) this.draw(text, isFinished);
    this.length = text.length;
  }

  clear() {
    this.box.replaceChildren();
    Object.assign(this, { settled: 0, length: 0, rest: [], code: null });
  }

  settle(nodes) {
    for (const node of nodes) {
      let chunk = this.box.lastChild;
      if (!chunk || chunk.childElementCount >= CHUNK) this.box.append(chunk = element("div", { class: "chunk" }));
      chunk.append(node);
    }
  }

  draw(text, isFinished) {
    const tokens = marked.lexer(text.slice(this.settled));
    const places = [...tokens.keys()].filter((place) => tokens[place].type !== "space");
    const count = isFinished ? tokens.length : places.at(-2) ?? 0;
    for (const node of this.rest) node.remove();
    const settled = tokens.slice(0, count);
    if (settled.length) this.settle(nodesOf(settled, true));
    this.settled += settled.reduce((sum, token) => sum + token.raw.length, 0);
    this.rest = nodesOf(tokens.slice(count), false);
    this.box.append(...this.rest);
    const last = tokens.at(-1);
    const isOpen = last?.type === "code" && /^ {0,3}[`~]{3}.*\n/.test(last.raw) && !/\n {0,3}[`~]{3,} *\n*$/.test(last.raw);
    this.code = (isOpen && !isFinished && this.rest.at(-1)?.querySelector("pre code")?.firstChild) || null;
    // While the block is open, marked takes off the line end that the next characters follow.
    if (this.code) this.code.data = last.raw.slice(last.raw.indexOf("\n") + 1);
  }
}

export function rendered(text) {
  const box = element("div", { class: "text" });
  new GrowingText(box).show(text, true);
  return box;
}
