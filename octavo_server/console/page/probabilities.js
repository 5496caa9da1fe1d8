// The tokens of an answer, each in the colour of its probability, with those that it was chosen from on hover or by arrow keys.
import { element } from "./elements.js";

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  if (value < 0.01) return "< 0.01 %";
  return `${value >= 10 ? value.toFixed(0) : value.toFixed(2)} %`;
};
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
// Four classes: certain tokens are left plain.
const classOf = (logprob) => ["p3", "p2", "p1", ""][[0.1, 0.5, 0.9].filter((bound) => Math.exp(logprob) > bound).length];

export function probabilities(tokens) {
  const box = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens and their probabilities: left and right arrow" });
  const card = element("div", { class: "card", role: "status", hidden: "" });
  tokens.forEach(({ token, logprob }) => box.append(element("span", { class: classOf(logprob) }, token)));
  let active = null;
  const show = (span) => {
    active?.classList.remove("active");
    active = span;
    card.hidden = !span;
    if (!span) return;
    span.classList.add("active");
    const { token, logprob, top } = tokens[[...box.children].indexOf(span)];
    const rows = [[token, logprob], ...top.filter(([other]) => other !== token)].map(([text, value], place) =>
      element("tr", place ? {} : { class: "chosen" }, element("td", {}, element("code", {}, visible(text))), element("td", {}, percent(value))));
    card.replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
    const [at, frame] = [span.getBoundingClientRect(), wrap.getBoundingClientRect()];
    card.style.left = `${Math.max(0, Math.min(at.left - frame.left, frame.width - card.offsetWidth))}px`;
    card.style.top = `${at.bottom - frame.top + 4}px`;
  };
  box.addEventListener("pointerover", ({ target }) => target !== box && show(target));
  box.addEventListener("pointerleave", () => show(null));
  box.addEventListener("blur", () => show(null));
  box.addEventListener("keydown", (event) => {
    const next = { ArrowRight: active?.nextElementSibling ?? (active ? null : box.firstElementChild), ArrowLeft: active?.previousElementSibling }[event.key];
    if (!next) return;
    event.preventDefault();
    show(next);
  });
  const wrap = element("div", { class: "token-view" }, box, card);
  return wrap;
}
