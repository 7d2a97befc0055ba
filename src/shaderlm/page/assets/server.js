// The source of answers that a server is: what it serves, and whether it is there. Asks again until it is.
//
// A source has: model (a name), defaults (of settings), context (tokens; null: not known), isReady, hasSchemas,
// start(changed), chat(request, signal), count(messages, signal), which gives the tokens of a prompt, and
// recover(problem), which is true if the same question may be asked again at once.

import { chat, complete, countTokens, props } from "./api.js";
import { answerLimit } from "./context.js";
import { askForKey, startKey } from "./key.js";
import { note } from "./panel.js";
import { Problem } from "./problems.js";
import { showDefaults } from "./settings.js";
import { count, showInfo, showStatus } from "./status.js";

const AGAIN_MS = 2000;
const TITLES = { unavailable: "Waiting for the model", key: "A key is needed" };

let timer = null;

/** The name of the implementation, without the reason for it. */
const backendName = (text) => text.split(":", 1)[0];

function connected(found) {
  const settings = found.default_generation_settings;
  const { n_predict: limit } = settings.params; // as many as the context holds: the server has no limit of its own
  source.model = found.model_alias;
  source.context = found.chat_template ? settings.n_ctx : null; // without a template, only the last message is sent
  source.defaults = { ...settings.params, max_tokens: limit < settings.n_ctx ? limit : answerLimit(settings.n_ctx) };
  const context = `context ${count(settings.n_ctx)}`;
  const line = (backend) => [found.device, backend, context].filter(Boolean).join(" · ");
  showStatus("ready", found.model_alias, line(backendName(found.backend)), line(found.backend));
  showInfo([
    ["Model", found.model_alias], ["Runs on", "the server"], ["Device", found.device], ["WebGPU", found.backend],
    ["Context", `${count(settings.n_ctx)} tokens`], ["Version", found.build_info],
  ]);
  document.title = `${found.model_alias} – shaderlm`;
  showDefaults(source.defaults);
}

/** Ask what is served. Where that fails, say why and ask again. */
async function connect() {
  clearTimeout(timer);
  try {
    const found = await props();
    connected(found);
    source.chat = found.chat_template ? chat : complete;
    if (!found.chat_template) note("template", "This model has no chat template. It continues the text that you write.");
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    if (problem.kind === "key" && (await askForKey())) return connect();
    const title = TITLES[problem.kind] ?? "No connection";
    showStatus(problem.kind === "unavailable" ? "waiting" : "lost", title, `${problem.title} ${problem.advice}`);
    if (problem.kind !== "key") timer = setTimeout(connect, AGAIN_MS);
  }
}

export const source = {
  model: null,
  defaults: null,
  context: null,
  isReady: true, // a question to a server that is away says so
  hasSchemas: true,
  chat,

  count(messages, signal) {
    return countTokens(source.model, messages, signal);
  },

  start() {
    startKey();
    return connect();
  },

  async recover(problem) {
    const isAnswered = problem.kind === "key" && (await askForKey());
    if (isAnswered || problem.kind !== "key") connect();
    return isAnswered;
  },
};
