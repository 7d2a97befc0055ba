// What the page says of the model: which one answers, whether it can, what is known of it, and how full its context is.

import { byId, make } from "./dom.js";

/** state: waiting, ready or lost. */
export function showStatus(state, title, text, more = text) {
  byId("server").dataset.state = state;
  byId("device").title = more;
  for (const [id, said] of [["model", title], ["device", text]]) {
    if (byId(id).textContent !== said) byId(id).textContent = said; // what stays is not read aloud again
  }
}

/** Names and values for the dialog behind the button ⓘ. Those without a value are left out. */
export function showInfo(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  byId("info-rows").replaceChildren(
    ...known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))),
  );
  byId("open-info").hidden = known.length === 0;
}

export const count = (n) => n.toLocaleString("en");

const NEARLY_FULL = 0.85;

/** How full the context was after the last answer of these messages. */
export function showContext(messages) {
  const { used, context } = messages.findLast(({ figures }) => figures?.used)?.figures ?? {};
  byId("context").hidden = !context;
  if (!context) return;
  const [meter, tokens] = [byId("context-meter"), Math.min(used, context)];
  const text = `${count(tokens)} of ${count(context)} tokens`;
  Object.assign(meter, { ariaValueMin: 0, ariaValueMax: context, ariaValueNow: tokens, ariaValueText: text });
  meter.classList.toggle("high", tokens > NEARLY_FULL * context);
  meter.firstElementChild.style.width = `${(100 * tokens) / context}%`;
  byId("context-text").textContent = text;
}

/** 46 kB, 4.2 MB, 96 MB, 4.7 GB. */
export function bytesText(n) {
  if (n < 1e6) return `${Math.round(n / 1e3)} kB`;
  return n < 1e9 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} MB` : `${(n / 1e9).toFixed(1)} GB`;
}

/** 134.5 million, 1.2 billion. */
export const parametersText = (n) => (n < 1e9 ? `${(n / 1e6).toFixed(1)} million` : `${(n / 1e9).toFixed(1)} billion`);
