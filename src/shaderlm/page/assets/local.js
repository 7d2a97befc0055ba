// The source of answers that this browser is: an export beside the page, run by its runtime in a worker.
// server.js says what a source has.

import { answerLimit } from "./context.js";
import { announce } from "./dom.js";
import { localProblem } from "./local_problems.js";
import { dropWorker, give, listeners } from "./local_worker.js";
import { keepForOffline, lookForNewer, useNewer } from "./offline.js";
import { note, showPanel } from "./panel.js";
import { sentence } from "./problems.js";
import { showDefaults } from "./settings.js";
import { bytesText, count, parametersText, showInfo, showStatus } from "./status.js";

// Where people say nothing; the server has the same for a chat.
const DEFAULTS = { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05 };
const OFF = { repeat_penalty: 1, presence_penalty: 0, frequency_penalty: 0 };
const STALE = ["fetch", "damaged"]; // so it looks when the server has a newer export than the page
const HOPELESS = ["insecure", "no-webgpu", "no-variant"]; // trying again changes nothing

let known = null; // what the plan says of the model
let loading = null; // one at a time, whoever asks
let isWanted = false; // has anybody said that the model may be fetched, now or earlier?
let changed = () => {};

function setReady(isReady) {
  source.isReady = isReady;
  changed();
}

// What is shown -----------------------------------------------------------------------------------------------

const sizeText = () => bytesText(known.model.weight_bytes);

function showModel(info = null) {
  const { model } = known;
  showInfo([
    ["Model", model.name], ["Architecture", model.architecture],
    ["Parameters", model.parameters && parametersText(model.parameters)], ["Size", sizeText()],
    ["Context", `${count(model.context)} tokens`], ["Reads", known.sees ? "text and pictures" : "text"], ["Runs on", "this device, in the browser"],
    ["Device", info?.device], ["Variant", info?.variant],
    ["Kept", info && (info.cached === "cache" ? "in this browser, for the next visit" : "in memory only")],
  ]);
}

function showOffer() {
  setReady(false);
  showStatus("waiting", known.model.name, `Not loaded · ${sizeText()}`);
  const text = "It runs in this browser, on the GPU of this device. It is fetched once and then kept here. "
    + "What you write stays on this device.";
  const load = [`Load model (${sizeText()})`, start];
  showPanel({ kind: "start", title: "The model is not loaded yet", text, actions: [load] });
}

function showProgress(title, { done = 0, total = 0, text = "…" } = {}) {
  showPanel({ kind: "busy", title, progress: { done, total, text }, actions: [["Cancel", cancel]] });
  showStatus("waiting", known.model.name, `${title}…`);
}

/** Weights and shaders come at the same time: weights are shown first. */
function progress() {
  let weights = null, shaders = null;
  return ({ stage, done, total }) => {
    if (stage === "weights") weights = { done, total, text: `${bytesText(done)} of ${bytesText(total)}` };
    if (stage === "compile") shaders = { done, total, text: `${count(done)} of ${count(total)}` };
    if (weights && weights.done < weights.total) showProgress("Loading the weights", weights);
    else if (shaders && (weights || stage === "compile")) showProgress("Compiling shaders", shaders);
    else showProgress("Reading the plan");
  };
}

/** Words for people, and a way on. */
function showFailure(problem) {
  setReady(false);
  showStatus("lost", known?.model.name ?? "No model", problem.title);
  const isReload = source.wasReady || problem.kind === "device-lost";
  const again = [isReload ? "Reload the model" : "Try again", isWanted ? start : begin];
  const actions = HOPELESS.includes(problem.kind) ? [] : [again];
  showPanel({ kind: "bad", title: problem.title, text: problem.advice, actions });
}

// The model ---------------------------------------------------------------------------------------------------

/** The model is gone. A new worker starts afresh. */
function fail(problem) {
  dropWorker(problem.kind, problem.advice);
  if (STALE.includes(problem.kind)) lookForNewer();
  showFailure(problem);
}

function cancel() {
  dropWorker("aborted");
}

async function load() {
  const show = progress();
  show({ stage: "plan" });
  if (!known.isCached) await useNewer({ isAsked: false });
  const { info } = await give("load", {}, show).done;
  known.isCached = info.cached === "cache";
  showModel(info);
  for (const [i, warning] of info.warnings.entries()) note(`warning-${i}`, sentence(warning));
  source.context = info.chat ? info.context : null; // without a template, only the last message is sent
  if (!info.chat) note("template", "This model has no chat template. It continues the text that you write.");
  const line = [info.device, info.variant, `context ${count(info.context)}`];
  showStatus("ready", info.name, line.filter(Boolean).join(" · "));
  showPanel(null);
  source.wasReady = true;
  setReady(true);
  announce("The model is loaded");
}

/** Load the model, once at a time. Problems are shown; true: it is there. */
function start() {
  isWanted = true;
  loading ??= load().then(() => true, (problem) => {
    if (problem.name === "AbortError") showOffer();
    else if (problem.kind) fail(problem);
    else throw problem;
    return false;
  }).finally(() => { loading = null; });
  return loading;
}

/** What is there, before anything large is fetched. */
async function look() {
  known = await give("check").done;
  source.model = known.model.name;
  source.sees = known.sees;
  source.defaults = { ...DEFAULTS, ...OFF, max_tokens: answerLimit(known.model.context) };
  document.title = `${known.model.name} – shaderlm`;
  showDefaults(source.defaults);
  showModel();
  if (known.missing) throw localProblem(known.missing);
}

async function begin() {
  showStatus("waiting", "shaderlm", "Looking for the model…");
  showPanel(null);
  try {
    await look();
  } catch (problem) {
    if (!problem.kind) throw problem;
    return fail(problem);
  }
  if (known.isCached) return void start(); // the page is there meanwhile
  await useNewer({ isAsked: true }); // nothing of the old version is lost
  showOffer();
}

// Answers -----------------------------------------------------------------------------------------------------

/** A request as the runtime takes it. */
function optionsOf({ repeat_penalty: repetition_penalty, ...options }) {
  if (repetition_penalty !== undefined) options.repetition_penalty = repetition_penalty;
  if (options.top_k < 0) options.top_k = 0; // off, as the server reads it
  return options;
}

function chunk({ kind, text, finishReason, prompt, tokens, rate, ...progress }) {
  if (kind === "progress") return { choices: [], progress };
  return {
    choices: [{ delta: text ? { content: text } : {}, finish_reason: finishReason }],
    timings: { prompt_n: prompt, predicted_n: tokens, predicted_per_second: rate },
  };
}

const aborted = (signal) => new Promise((_, reject) => {
  signal.addEventListener("abort", () => reject(new DOMException("", "AbortError")), { once: true });
});

/** A model that was lost is loaded again. */
async function ready(signal) {
  if (!source.isReady && !(await Promise.race([start(), aborted(signal)]))) throw localProblem("closed");
}

/** Chunks as the server streams them. */
async function* chat({ messages, ...given }, signal) {
  await ready(signal);
  const parts = [];
  let wake = () => {};
  let end = null;
  const { done, stop } = give("chat", { messages, options: optionsOf(given) }, (part) => { parts.push(part); wake(); });
  const over = done.then((last) => { end = { last }; }, (problem) => { end = { problem }; }).then(() => wake());
  signal.addEventListener("abort", stop, { once: true });
  if (signal.aborted) stop();
  try {
    for (;;) {
      while (parts.length) yield chunk(parts.shift());
      if (end) break;
      await new Promise((resolve) => { wake = resolve; });
    }
  } finally {
    signal.removeEventListener("abort", stop);
    if (!end) stop();
    await over;
  }
  if (end.problem) throw end.problem;
  if (end.last.finishReason === "abort") throw new DOMException("", "AbortError");
  yield chunk(end.last);
}

export const source = {
  model: null,
  defaults: null,
  context: null,
  sees: false,
  isReady: false,
  wasReady: false,
  hasSchemas: false,
  chat,

  async open() {
    return source; // a question loads the model
  },

  use() {}, // there is one

  async count(messages, signal) {
    await ready(signal);
    return (await give("count", { messages }).done).tokens;
  },

  async start(told) {
    changed = told;
    listeners.lost = fail;
    if (!isSecureContext) return showFailure(localProblem("insecure"));
    keepForOffline();
    return begin();
  },

  async recover() {
    return false; // a loss is told by the worker, too
  },
};
