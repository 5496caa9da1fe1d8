// Pictures and text files of the message that is being written: chosen, pasted or dropped.
import { button, element, find } from "./elements.js";
import { chosenModel, takesImages } from "./models.js";

const LARGEST_SIDE = 2048; // pixels; models see no more of a picture
const MOST_IMAGE_BYTES = 4 << 20; // a larger picture is made smaller
const MOST_TEXT_BYTES = 4 << 20;
const READABLE = /^image\/(png|jpeg|webp|gif)$/;
let images = [];
let files = [];

export function startAttachments() {
  find("attach").addEventListener("click", () => find("attach-files").click());
  find("attach-files").addEventListener("change", async () => {
    await take(find("attach-files").files);
    find("attach-files").value = "";
  });
  find("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
  const chat = find("chat");
  chat.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    chat.classList.add("dropping");
  });
  chat.addEventListener("dragleave", (event) => chat.contains(event.relatedTarget) || chat.classList.remove("dropping"));
  chat.addEventListener("drop", (event) => {
    chat.classList.remove("dropping");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    take(event.dataTransfer.files);
  });
}

// Adds files to the message; says which cannot be sent, and why.
async function take(list) {
  const problems = [];
  for (const file of list) {
    try {
      if (file.type.startsWith("image/") && file.type !== "image/svg+xml") images.push(await imageUrl(file));
      else files.push({ name: file.name, text: await textOf(file) });
    } catch (error) {
      problems.push(`${file.name}: ${error.message}`);
    }
  }
  show(problems.join(" "));
  find("prompt").focus();
}

async function textOf(file) {
  if (file.size > MOST_TEXT_BYTES) throw new Error(`a text file may have at most ${MOST_TEXT_BYTES >> 20} MiB.`);
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch { /* not UTF-8 */ }
  throw new Error("this is neither a picture nor a text in UTF-8.");
}

async function imageUrl(file) {
  if (!takesImages()) throw new Error(`${chosenModel() || "this model"} does not take pictures.`);
  if (READABLE.test(file.type) && file.size <= MOST_IMAGE_BYTES) return dataUrl(file);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error("the browser cannot read this picture.");
  }
  const scale = Math.min(1, LARGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", { width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("the browser could not read it."));
    reader.readAsDataURL(file);
  });
}

function show(problem = "") {
  const drop = (list, place) => () => {
    list.splice(place, 1);
    show();
  };
  const pictures = images.map((url, place) => element("span", { class: "chip" },
    element("img", { src: url, alt: `Picture ${place + 1}` }), button("×", drop(images, place), { "aria-label": `Remove picture ${place + 1}` })));
  const texts = files.map(({ name }, place) => element("span", { class: "chip" }, name, button("×", drop(files, place), { "aria-label": `Remove ${name}` })));
  find("attachments").replaceChildren(...pictures, ...texts, ...(problem ? [element("p", { class: "error", role: "alert" }, problem)] : []));
}

// What the next message has besides its text; nothing is attached afterwards.
export function takeAttachments() {
  const taken = { ...(images.length ? { images } : {}), ...(files.length ? { files } : {}) };
  [images, files] = [[], []];
  show();
  return taken;
}

export const hasAttachments = () => images.length + files.length > 0;
