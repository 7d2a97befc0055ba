// The list of conversations: at the side where there is space, over the page where there is not.

import { byId, make } from "./dom.js";
import { titleOf } from "./store.js";

export function startMenu(store, { open, remove }) {
  const nav = byId("chats");
  const button = byId("menu");
  const isOpen = () => nav.classList.contains("open");

  function toggle(wanted) {
    nav.classList.toggle("open", wanted);
    button.setAttribute("aria-expanded", String(wanted));
    byId("page").inert = wanted; // what is covered cannot be reached
    byId("shade").hidden = !wanted;
    (wanted ? byId("new") : button).focus();
  }

  function close() {
    const was = isOpen();
    if (was) toggle(false);
    return was;
  }

  const dialog = byId("delete-dialog");
  let decide = null; // what waits for the dialog
  dialog.addEventListener("close", () => {
    if (dialog.open) return; // the event of an earlier time: it comes late
    decide?.(dialog.returnValue === "delete");
    decide = null;
  });

  function confirmed(conversation) {
    decide?.(false);
    byId("delete-name").textContent = titleOf(conversation);
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((resolve) => { decide = resolve; });
  }

  function entry(conversation, current) {
    const title = titleOf(conversation);
    const choose = () => { close(); open(conversation); };
    const drop = async () => { if (await confirmed(conversation)) remove(conversation); };
    const shown = conversation.id === current ? "page" : null;
    return make("li", {},
      make("button", { type: "button", class: "chat", title, "aria-current": shown, click: choose }, make("span", {}, title)),
      make("button", { type: "button", class: "drop", "aria-label": `Delete: ${title}`, click: drop }, "×"));
  }

  button.addEventListener("click", () => toggle(true));
  byId("shade").addEventListener("click", close);
  matchMedia("(min-width: 801px)").addEventListener("change", (event) => { if (event.matches) close(); });
  const show = (current) => byId("list").replaceChildren(...store.list().map((each) => entry(each, current)));
  return { close, show };
}
