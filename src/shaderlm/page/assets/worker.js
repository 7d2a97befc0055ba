// Runs the model in a thread of its own, so that the page stays responsive: hashing, tokenising and submitting work
// take time that would be missing for drawing. Knows no page.
//
// Takes {id, task, …}: check, load, count, chat, and stop of a chat. Answers {id, kind, …}: progress, text, and at last done
// or failed. {kind: "lost"} belongs to no task.

import * as runtime from "../shaderlm.js";

const folder = new URL("..", import.meta.url).href;
const stops = new Map(); // id of a chat → its AbortController
let model = null;

async function readPlan() {
  const response = await fetch(new URL("plan.json", folder), { cache: "no-cache" }).catch(() => null);
  if (response?.ok) return response.json();
  const reason = response ? `the server answers ${response.status}` : "the server does not answer";
  throw new runtime.ShaderlmError("fetch", `plan.json is not there: ${reason}. Is it still running?`);
}

/** What is known before anything large is fetched. */
async function check() {
  const { model: about, vision } = await readPlan();
  const found = { model: about, sees: Boolean(vision), isCached: await runtime.cached(folder) };
  if (!navigator.gpu) found.missing = "no-webgpu";
  else if (!(await navigator.gpu.requestAdapter())) found.missing = "no-adapter";
  return found;
}

async function load({ id }) {
  model = await runtime.load(folder, { onProgress: (progress) => postMessage({ id, kind: "progress", ...progress }) });
  model.lost.then(({ code, message }) => postMessage({ kind: "lost", code, message }));
  return { info: model.info };
}

async function count({ messages }) {
  return { tokens: (await model.tokenizeChat(messages)).length };
}

async function chat({ id, messages, options }) {
  const stop = new AbortController();
  stops.set(id, stop);
  const onProgress = (progress) => postMessage({ id, kind: "progress", ...progress });
  const given = { ...options, signal: stop.signal, onProgress };
  const texts = model.info.chat ? model.chat(messages, given) : model.complete(messages.at(-1).content, given);
  try {
    for await (const text of texts) postMessage({ id, kind: "text", text, ...figures() });
  } finally {
    stops.delete(id);
  }
  // `last` may be another answer's if this one was stopped before its turn.
  return { ...figures(), finishReason: stop.signal.aborted ? "abort" : model.last.finishReason };
}

function figures() {
  const { promptTokens = 0, completionTokens = 0, tokensPerSecond = 0 } = model.last ?? {};
  return { prompt: promptTokens, tokens: completionTokens, rate: tokensPerSecond || null };
}

const TASKS = { check, load, count, chat };

addEventListener("message", async ({ data }) => {
  const { id, task } = data;
  if (task === "stop") return stops.get(data.of)?.abort();
  try {
    postMessage({ id, kind: "done", ...(await TASKS[task](data)) });
  } catch (problem) {
    const code = problem instanceof runtime.ShaderlmError ? problem.code : "unknown";
    postMessage({ id, kind: "failed", code, message: problem.message });
  }
});
