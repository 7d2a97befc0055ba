// Pictures for the next message: chosen by a button, dropped or pasted. Each becomes a data URL that is small enough to
// be kept with the conversation. Knows no conversations.

import { announce, byId, make } from "./dom.js";

const SIDE = 1024; // pixels of the longer side: a browser keeps some dozens of these
const QUALITY = 0.85; // of JPEG
export const MOST_PICTURES = 8; // of a message
const MOST_NAMES = 3; // of files that are no pictures, in a message about them

let pictures = [];
let isOn = false;
let around = (draw) => draw(); // thumbnails take space from what is above them

/** As a JPEG, turned as its file says, on white, and no larger than it may be. */
async function dataUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = make("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

/** Pictures of a message, in a row; `remove(i)` makes each a button that takes it away. */
export function row(urls, remove = null) {
  const shown = urls.map((src, i) => {
    const image = make("img", { src, alt: `Picture ${i + 1}` });
    if (!remove) return image;
    const label = `Remove picture ${i + 1}`;
    const button = make("button", { type: "button", class: "plain", "aria-label": label, title: label, click: () => remove(i) }, "×");
    return make("span", {}, image, button);
  });
  return make("div", { class: "pictures" }, ...shown);
}

function show() {
  const remove = (i) => {
    pictures.splice(i, 1);
    show();
    byId("prompt").focus();
  };
  around(() => byId("pictures").replaceChildren(...(pictures.length ? [row(pictures, remove)] : [])));
}

async function add(files) {
  const bad = [];
  let isFull = false;
  for (const file of files) {
    isFull = pictures.length >= MOST_PICTURES;
    if (isFull) break;
    try {
      pictures.push(await dataUrl(file));
    } catch { // the browser cannot decode it
      bad.push(file.name.slice(0, 80) || "A file");
      continue;
    }
    show();
    announce("A picture is added");
  }
  const names = [...bad.slice(0, MOST_NAMES), ...(bad.length > MOST_NAMES ? [`${bad.length - MOST_NAMES} more`] : [])];
  const problems = [];
  if (bad.length === 1) problems.push(`${names[0]} is no picture that this browser can read.`);
  if (bad.length > 1) problems.push(`No pictures that this browser can read: ${names.join(", ")}.`);
  if (isFull) problems.push(`A message has at most ${MOST_PICTURES} pictures.`);
  tell(problems.join(" "));
}

function tell(text) {
  byId("picture-problem").textContent = text;
}

/** What was chosen, which is then no longer there. */
export function take() {
  const taken = pictures;
  pictures = [];
  tell("");
  show();
  return taken;
}

export const hasPictures = () => pictures.length > 0;

/** The model that answers reads pictures, or it does not. */
export function allowPictures(allowed) {
  isOn = allowed;
  byId("add-picture").hidden = !isOn;
}

/** keepingPlace: calls what it is given, which changes the height of the form. */
export function startPictures(keepingPlace) {
  around = keepingPlace;
  const field = byId("picture-file");
  byId("add-picture").addEventListener("click", () => field.click());
  field.addEventListener("change", async () => {
    await add([...field.files]);
    field.value = ""; // the same file may be chosen again
    byId("prompt").focus();
  });
  const given = (data) => (isOn ? [...(data?.files ?? [])] : []);
  byId("prompt").addEventListener("paste", (event) => {
    const files = given(event.clipboardData);
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
  const page = byId("page");
  page.addEventListener("dragover", (event) => {
    if (isOn && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  page.addEventListener("drop", (event) => {
    const files = given(event.dataTransfer);
    if (!files.length) return;
    event.preventDefault();
    add(files);
  });
}
