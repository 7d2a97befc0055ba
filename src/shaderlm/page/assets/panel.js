// What stands between people and answers, above the box for messages: a problem or a start, with progress and buttons.
// And notes, which do not.

import { byId, make } from "./dom.js";

let shown = []; // the buttons

const isSame = (actions) => actions.length === shown.length
  && actions.every(([label, click], i) => shown[i][0] === label && shown[i][1] === click);

/** Other buttons. Who had one of the old ones in focus goes on with the new ones. */
function showActions(actions, isMain) {
  if (isSame(actions)) return;
  shown = actions;
  const row = byId("panel-actions");
  const hadFocus = row.contains(document.activeElement);
  const look = isMain ? "main" : null;
  const made = actions.map(([label, click]) => make("button", { type: "button", class: look, click }, label));
  row.replaceChildren(...made);
  if (hadFocus) (made[0] ?? byId("prompt")).focus();
}

/**
 * {kind, title, text, progress: {done, total, text}, actions: [[label, function]]}; null: nothing.
 * kind: start, busy (its buttons end what is going on) or bad.
 */
export function showPanel(given) {
  const panel = byId("panel");
  if (given === null) showActions([]);
  panel.hidden = given === null;
  if (given === null) return;
  const { kind, title, text = "", progress = null, actions = [] } = given;
  panel.dataset.kind = kind;
  for (const [id, said] of [["panel-title", title], ["panel-text", text]]) {
    if (byId(id).textContent !== said) byId(id).textContent = said; // what stays is not read aloud again
  }
  const bar = byId("panel-bar");
  bar.hidden = byId("panel-done").hidden = progress === null;
  if (progress) {
    if (progress.total) bar.value = progress.done / progress.total;
    else bar.removeAttribute("value"); // it only moves
    byId("panel-done").textContent = progress.text;
  }
  showActions(actions, kind !== "busy");
}

/** A note that people can close. One that is told again replaces itself. */
export function note(id, text, action = null) {
  const found = byId(`note-${id}`);
  const close = () => { byId(`note-${id}`)?.remove(); };
  const more = action && make("button", { type: "button", class: "plain", click: action[1] }, action[0]);
  const button = make("button", { type: "button", class: "plain", "aria-label": "Close this note", click: close }, "×");
  const made = make("div", { id: `note-${id}`, class: "note" }, make("p", {}, text), more, button);
  if (found) found.replaceWith(made);
  else byId("notes").append(made);
}
