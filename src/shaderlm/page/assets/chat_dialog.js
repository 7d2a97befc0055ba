// What can be done to a conversation of the list: another name, a file of it, and its end.

import { byId } from "./dom.js";
import { firstWords, titleOf, TITLE_LENGTH } from "./texts.js";
import { exportFile } from "./transfer.js";

/** The function that opens the dialog of a conversation. */
export function startChatDialog({ renamed, remove }) {
  const dialog = byId("chat-dialog");
  const name = byId("chat-name");
  let conversation = null;
  name.maxLength = TITLE_LENGTH;

  byId("chat-form").addEventListener("submit", () => {
    const title = name.value.replace(/\s+/g, " ").trim();
    if (title === (conversation.title ?? "")) return;
    if (title) conversation.title = title;
    else delete conversation.title;
    renamed(conversation);
  });
  for (const [id, kind] of [["chat-json", "json"], ["chat-markdown", "md"]]) {
    byId(id).addEventListener("click", () => {
      dialog.close();
      exportFile([conversation], titleOf(conversation), kind);
    });
  }
  byId("chat-delete").addEventListener("click", () => {
    dialog.close();
    remove(conversation);
  });

  return (given) => {
    conversation = given;
    name.value = given.title ?? "";
    name.placeholder = firstWords(given);
    dialog.showModal();
  };
}
