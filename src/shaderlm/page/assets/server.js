// The source of answers that a server is: what it serves, and whether it is there. Asks again until it is.
//
// A source has: model (a name), isReady, sees (pictures), hasSchemas, start(changed, chosen), use(model), which is what a conversation
// wants, and open(model, signal), which gives what answers: model, isChosen (of several), defaults (of settings), context
// (tokens; null: not known), chat(request, signal), and count(messages, signal), the tokens of a prompt.
// recover(problem) is true if the same question may be asked again at once.

import { chat, complete, countTokens, models as listModels, props } from "./api.js";
import { answerLimit } from "./context.js";
import { askForKey, startKey } from "./key.js";
import { choose, isNamed, lineOf, showModels, startModels, stateOf } from "./models.js";
import { note } from "./panel.js";
import { Problem } from "./problems.js";
import { showDefaults } from "./settings.js";
import { count, showInfo, showStatus } from "./status.js";

const AGAIN_MS = 2000;
const LOADING_MS = 500; // between two looks at a model that is being loaded
const TITLES = { unavailable: "Waiting for the model", key: "A key is needed", refused: "No model" };

let timer = null;
let shown = () => {}; // told when what is known of the model is another
let looks = 0; // the latest one counts
let models = []; // that are served
let wanted = null; // the model that the conversation wants
const sessions = new Map(); // model → what answers

/** The name of the implementation, without the reason for it. */
const backendName = (text) => text.split(":", 1)[0];

/** What answers, by what a server says of a model. */
function sessionOf(found) {
  const { params = {}, n_ctx: size = null } = found.default_generation_settings ?? {};
  const { model_alias: model, chat_template: template } = found;
  const { n_predict: limit } = params; // as many as the context holds: the server has no limit of its own
  const most = size === null ? {} : { max_tokens: limit < size ? limit : answerLimit(size) };
  return {
    found, model, size,
    sees: Boolean(found.modalities?.vision),
    isChosen: models.length > 1,
    context: template ? size : null, // without a template, only the last message is sent
    defaults: { ...params, ...most },
    chat: (request, signal) => answer(template ? chat : complete, { model, ...request }, signal),
    count: (messages, signal) => countTokens(model, messages, signal),
  };
}

/** Chunks of an answer. It may have loaded one model, and closed another. */
async function* answer(ask, request, signal) {
  try {
    yield* ask(request, signal);
  } finally {
    if (models.length > 1) connect();
  }
}

function showSession({ found, model, size, defaults, sees }) {
  source.sees = sees;
  shown();
  const context = size && `context ${count(size)}`;
  const line = (backend) => [found.device, backend, context].filter(Boolean).join(" · ");
  showStatus("ready", model, line(backendName(found.backend ?? "")), line(found.backend));
  showInfo([
    ["Model", model], ["Runs on", "the server"], ["Device", found.device], ["WebGPU", found.backend],
    ["Context", size && `${count(size)} tokens`], ["Reads", sees ? "text and pictures" : "text"], ["Version", found.build_info],
  ]);
  showDefaults(defaults);
  if (!found.chat_template) note("template", "This model has no chat template. It continues the text that you write.");
}

function showUnloaded(model) {
  source.sees = false; // not known before it is loaded
  shown();
  showStatus(stateOf(model) === "failed" ? "lost" : "waiting", model.id, lineOf(model));
  showInfo([["Model", model.id], ["Runs on", "the server"]]);
}

/** What is shown of the model that is wanted; what is known of one that is loaded is asked for. */
async function look() {
  const mine = ++looks;
  const listed = await listModels();
  if (mine !== looks) return;
  models = listed;
  const model = choose(models, wanted, source.model);
  source.model = model?.id ?? null;
  showModels(models, source.model);
  const isGone = models.length > 1 && wanted && !isNamed(model, wanted);
  if (isGone) note("model", `The model ${wanted.slice(0, 100)} is not served here. Another one answers.`);
  if (model && stateOf(model) !== "loaded") {
    showUnloaded(model);
  } else {
    const session = sessionOf(await props(source.model));
    if (mine !== looks) return;
    sessions.set(source.model, session);
    source.model ??= session.model;
    showSession(session);
  }
  document.title = `${source.model} – shaderlm`;
  if (models.some((each) => stateOf(each) === "loading")) timer = setTimeout(connect, LOADING_MS);
}

/** Ask what is served. Where that fails, say why and ask again. */
async function connect() {
  clearTimeout(timer);
  try {
    await look();
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    sessions.clear(); // it may be another server that comes back
    if (problem.kind === "key" && (await askForKey())) return connect();
    const title = TITLES[problem.kind] ?? "No connection";
    showModels([]);
    showStatus(problem.kind === "unavailable" ? "waiting" : "lost", title, `${problem.title} ${problem.advice}`);
    if (problem.kind !== "key") timer = setTimeout(connect, AGAIN_MS);
  }
}

export const source = {
  model: null,
  sees: false,
  isReady: true, // a question to a server that is away says so
  hasSchemas: true,

  start(changed, chosen) {
    startKey();
    shown = changed;
    startModels((name) => {
      chosen(name);
      source.use(name);
    });
    addEventListener("visibilitychange", () => { if (!document.hidden && models.length > 1) connect(); });
    return connect();
  },

  use(model) {
    const isOther = model !== wanted;
    wanted = model;
    if (isOther && models.length > 1) connect();
  },

  async open(model, signal) {
    const name = choose(models, model, source.model)?.id ?? model;
    const session = sessions.get(name);
    if (session) return session;
    clearTimeout(timer);
    timer = setTimeout(connect, LOADING_MS); // it shows that the model is being loaded
    sessions.set(name, sessionOf(await props(name, signal)));
    return sessions.get(name);
  },

  async recover(problem) {
    const isAnswered = problem.kind === "key" && (await askForKey());
    if (isAnswered || problem.kind !== "key") connect();
    return isAnswered;
  },
};
