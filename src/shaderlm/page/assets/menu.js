// The list of conversations and the search in it: at the side where there is space, over the page where there is not.

import { startChatDialog } from "./chat_dialog.js";
import { announce, byId, make } from "./dom.js";
import { search } from "./search.js";
import { titleOf } from "./texts.js";

export function startMenu(store, { open, renamed, remove, restore }) {
  const nav = byId("chats");
  const button = byId("menu");
  const field = byId("search");
  const isOpen = () => nav.classList.contains("open");
  let current = null; // the id of the conversation that is shown

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

  // A deleted conversation comes back by a button that stays until the next one is deleted.
  function removeWithUndo(conversation) {
    remove(conversation);
    const undo = make("button", { type: "button", class: "plain", click: () => {
      byId("deleted").replaceChildren();
      restore(conversation);
      byId("list").querySelector("[aria-current]")?.focus();
      announce("The conversation is back");
    } }, "Undo");
    byId("deleted").replaceChildren(make("p", {}, `Deleted: ${titleOf(conversation)}`), undo);
    undo.focus();
    announce(`Deleted: ${titleOf(conversation)}`);
  }

  const openDialog = startChatDialog({ renamed, remove: removeWithUndo });

  function entry({ conversation, excerpt }) {
    const title = titleOf(conversation);
    const choose = () => { close(); open(conversation); };
    const shown = conversation.id === current ? "page" : null;
    const found = excerpt && make("span", { class: "excerpt" }, excerpt[0], make("mark", {}, excerpt[1]), excerpt[2]);
    const more = { type: "button", class: "more", "aria-label": `More: ${title}`, "aria-haspopup": "dialog" };
    return make("li", {},
      make("button", { type: "button", class: "chat", title, "aria-current": shown, click: choose },
        make("span", { class: "title" }, title), found),
      make("button", { ...more, click: () => openDialog(conversation) }, "⋯"));
  }

  function show(id = current) {
    current = id;
    const all = store.list();
    const query = field.value.trim();
    const found = query ? search(all, query) : all.map((conversation) => ({ conversation, excerpt: null }));
    byId("list").replaceChildren(...found.map(entry));
    byId("found").textContent = query ? `${found.length} of ${all.length} conversations` : "";
  }

  button.addEventListener("click", () => toggle(true));
  byId("shade").addEventListener("click", close);
  field.addEventListener("input", () => {
    show();
    announce(byId("found").textContent);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !field.value) return;
    event.preventDefault();
    event.stopPropagation(); // it neither closes the list nor stops an answer
    field.value = "";
    show();
  });
  matchMedia("(min-width: 801px)").addEventListener("change", (event) => { if (event.matches) close(); });
  return { close, show };
}
