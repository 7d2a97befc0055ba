// The models of a server: what is known of them, and the choice between them where there are several.

import { byId, make } from "./dom.js";
import { sentence } from "./problems.js";

const NOT_LOADED = "not loaded";
const WORDS = { unloaded: NOT_LOADED, sleeping: NOT_LOADED, loading: "loading…", failed: "failed to load" };
const LINES = {
  unloaded: "Not loaded. The next message loads it.", sleeping: "Not loaded. The next message loads it.",
  loading: "Loading…",
};

/** unloaded, sleeping, loading, loaded, failed, or another word of the server. One that has no states is loaded. */
export function stateOf({ status, state }) {
  if (status?.failed && status.value !== "loading") return "failed";
  const found = status?.value ?? status ?? state;
  return typeof found === "string" && found !== "ready" ? found : "loaded";
}

/** What is said of a model that is not loaded. */
export function lineOf(model) {
  const state = stateOf(model);
  if (state !== "failed") return LINES[state] ?? sentence(state);
  const { error } = model.status ?? {};
  return `It failed to load${error ? `: ${sentence(String(error))}` : "."} The next message tries again.`;
}

export const isNamed = ({ id, aliases }, name) => id === name || (Array.isArray(aliases) && aliases.includes(name));

/** The model of a name. Without one, or where it is gone: the last one, the first that is loaded, the first. */
export function choose(models, name, last) {
  const named = (wanted) => models.find((each) => isNamed(each, wanted));
  return named(name) ?? named(last) ?? models.find((each) => stateOf(each) === "loaded") ?? models[0];
}

const labelOf = (model) => {
  const state = stateOf(model);
  return state === "loaded" ? model.id : `${model.id} · ${WORDS[state] ?? state}`;
};

/** Several models are a list, one is a title. */
export function showModels(models, chosen) {
  const list = byId("models");
  const isList = models.length > 1;
  list.hidden = !isList;
  byId("model").classList.toggle("unseen", isList);
  const labels = models.map(labelOf);
  if ([...list.options].map(({ text }) => text).join("\n") !== labels.join("\n")) { // an open list stays open
    list.replaceChildren(...models.map(({ id }, i) => make("option", { value: id }, labels[i])));
  }
  if (chosen) list.value = chosen;
}

/** `chosen` is called with the name that people choose. */
export function startModels(chosen) {
  byId("models").addEventListener("change", () => chosen(byId("models").value));
}
