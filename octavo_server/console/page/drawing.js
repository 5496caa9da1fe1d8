// What the engine's pictures share: canvases of the size that they are shown in, and a colour for each request.
import { find } from "./elements.js";

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colourOf = (request) => `hsl(${(request * 137) % 360} 55% 52%)`;

// A canvas of the size that it is shown in, cleared.
export function canvas(id) {
  const node = find(id);
  const ratio = devicePixelRatio || 1;
  const [width, height] = [node.clientWidth, node.clientHeight];
  node.width = width * ratio;
  node.height = height * ratio;
  const context = node.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

// A slider over what was seen, whose end is now: it stays at the end until it is moved. `shown` is called when it is moved.
export class Moments {
  constructor(id, most, shown) {
    this.slider = find(id);
    this.most = most;
    this.kept = [];
    this.isLive = true;
    this.slider.addEventListener("input", () => {
      this.isLive = Number(this.slider.value) === this.kept.length - 1;
      shown();
    });
  }

  add(...moments) {
    this.kept.push(...moments);
    const dropped = Math.max(0, this.kept.length - this.most);
    this.kept.splice(0, dropped);
    const end = Math.max(0, this.kept.length - 1);
    this.slider.max = String(end);
    this.slider.value = String(this.isLive ? end : Math.max(0, Number(this.slider.value) - dropped));
    this.slider.disabled = this.kept.length < 2;
  }

  clear() {
    this.kept = [];
    this.isLive = true;
    this.add();
  }

  get place() {
    return Number(this.slider.value);
  }

  get chosen() {
    return this.kept[this.place];
  }
}
