// What the page knows of its server: the model, the device, and whether it is there. Asks again until it is.

import { props } from "./api.js";
import { byId } from "./dom.js";
import { askForKey } from "./key.js";
import { Problem } from "./problems.js";
import { showDefaults } from "./settings.js";

const AGAIN_MS = 2000;
const TITLES = { unavailable: "Waiting for the model", key: "A key is needed" };

export const server = { model: null, defaults: null };

let timer = null;

function show(state, title, text) {
  byId("server").dataset.state = state;
  byId("device").title = text;
  for (const [id, said] of [["model", title], ["device", text]]) {
    if (byId(id).textContent !== said) byId(id).textContent = said; // what stays is not read aloud again
  }
}

/** The name of the implementation, without the reason for it. */
const backendName = (text) => text.split(":", 1)[0];

function connected(found) {
  const settings = found.default_generation_settings;
  server.model = found.model_alias;
  server.defaults = settings.params;
  const context = `context ${settings.n_ctx.toLocaleString("en")}`;
  const parts = [found.device, backendName(found.backend), context].filter(Boolean);
  show("ready", found.model_alias, parts.join(" · "));
  byId("device").title = [found.device, found.backend, context].filter(Boolean).join(" · ");
  document.title = `${found.model_alias} – shaderlm`;
  showDefaults(settings.params);
}

/** Ask what is served. Where that fails, say why and ask again. */
export async function connect() {
  clearTimeout(timer);
  try {
    connected(await props());
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    if (problem.kind === "key" && (await askForKey())) return connect();
    const title = TITLES[problem.kind] ?? "No connection";
    show(problem.kind === "unavailable" ? "waiting" : "lost", title, `${problem.title} ${problem.advice}`);
    if (problem.kind !== "key") timer = setTimeout(connect, AGAIN_MS);
  }
}
