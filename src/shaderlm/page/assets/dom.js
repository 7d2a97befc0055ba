// Elements. Text only ever becomes text nodes and attribute values, so nothing that a model writes becomes markup.

export const byId = (id) => document.getElementById(id);

/** An element. Properties that are functions listen to the event of their name. */
export function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (typeof value === "function") node.addEventListener(key, value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Make a box for text as high as what is in it, within limits that the style sets. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`; // with its border
}

/** Is a finger what points? */
export const byTouch = () => matchMedia("(pointer: coarse)").matches;

/** Does a key press send what was written? With a keyboard on the screen, Enter starts a new line. */
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && !byTouch();

/** Say something to people who listen to the page. */
export function announce(text) {
  byId("said").textContent = text;
}

/** Give people a text as a file. */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // the browser reads it meanwhile
}

/** A button that copies a text. Browsers without a clipboard (plain HTTP from another machine) get none. */
export function copyButton(text, label) {
  if (!navigator.clipboard) return null;
  const button = make("button", { type: "button", class: "plain", "aria-label": label }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
      announce("Copied");
    } catch {
      button.textContent = "Not allowed";
      announce("The browser does not allow to copy");
    }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}
