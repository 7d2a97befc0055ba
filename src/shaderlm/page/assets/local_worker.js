// The page's side of worker.js: tasks, what comes before their end, and their end. Knows neither models nor the page.

import { localProblem } from "./local_problems.js";

const tasks = new Map(); // id → what takes its messages
let worker = null;
let number = 0;

/** What is told of a problem that belongs to no task. */
export const listeners = { lost: () => {} };

function endTasks(message) {
  for (const take of [...tasks.values()]) take({ kind: "failed", ...message });
}

function startWorker() {
  const mine = worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  mine.addEventListener("message", ({ data }) => {
    if (mine !== worker) return;
    if (data.kind === "lost") listeners.lost(localProblem(data.code, data.message));
    else tasks.get(data.id)?.(data);
  });
  mine.addEventListener("error", (event) => {
    event.preventDefault(); // it is told to people
    if (mine === worker) endTasks({ code: "worker", message: event.message ?? "" });
  });
}

/** End the worker with everything that it holds. The next task starts a new one. */
export function dropWorker(code, message = "") {
  worker?.terminate();
  worker = null;
  endTasks({ code, message });
}

/** Give the worker a task. `told` gets what comes before its end; `done` is its end, or a Problem, or an AbortError. */
export function give(task, given = {}, told = () => {}) {
  if (!worker) startWorker();
  const id = ++number;
  const done = new Promise((resolve, reject) => {
    tasks.set(id, (data) => {
      if (data.kind !== "done" && data.kind !== "failed") return told(data);
      tasks.delete(id);
      if (data.kind === "done") resolve(data);
      else reject(data.code === "aborted" ? new DOMException("", "AbortError") : localProblem(data.code, data.message));
    });
  });
  worker.postMessage({ id, task, ...given });
  return { done, stop: () => worker?.postMessage({ task: "stop", of: id }) };
}
