// The models that are served, and the one that is chosen.
import { element, find } from "./elements.js";
import { ask } from "./server.js";

let models = [];

export const chosenModel = () => find("model").value;
// For what is told of one engine, of the several that a server may have.
export const modelQuery = () => (models.length > 1 ? `?model=${encodeURIComponent(chosenModel())}` : "");
export const takesImages = (name = chosenModel()) => !!models.find((model) => model.id === name)?.input_modalities?.includes("image");

// The models that answer: the chosen one, and those beside it.
export function answeringModels() {
  const beside = [...find("beside").querySelectorAll("input:checked")].map((box) => box.value);
  return [chosenModel(), ...beside.filter((name) => name !== chosenModel())];
}

// Throws the error of the request.
export async function loadModels() {
  const before = chosenModel();
  try {
    models = (await (await ask("/v1/models")).json()).data;
  } catch (error) {
    if (!models.length) find("model").replaceChildren(new Option("no models", ""));
    throw error;
  }
  find("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
  if (models.some((model) => model.id === before)) find("model").value = before;
  const boxes = models.map((model) => {
    const box = element("input", { type: "checkbox", value: model.id });
    return element("label", { class: "check" }, box, ` ${model.id}`);
  });
  find("beside").replaceChildren(element("legend", {}, "Answer side by side with"), ...boxes);
  find("beside").hidden = models.length < 2;
  showOthers();
}

// The chosen model is not beside itself.
export function showOthers() {
  for (const box of find("beside").querySelectorAll("input")) box.parentElement.hidden = box.value === chosenModel();
}
