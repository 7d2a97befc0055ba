// Talks to the server. Knows no page. Addresses are relative: the page may be served below any path.

import { cut, offline, problemOf } from "./problems.js";

let key = null;

/** The key for all later requests; null: none. */
export function useKey(given) {
  key = given;
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (problem) {
    throw problem.name === "AbortError" ? problem : offline();
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw problemOf(response.status, body.error, Number(response.headers.get("Retry-After")) || null);
}

/** The models that are served. */
export async function models() {
  return (await (await ask("v1/models")).json()).data ?? [];
}

/** What is known of a model: llama-server's /props. One that is not loaded is loaded for that. */
export async function props(model, signal) {
  return (await ask(model ? `props?model=${encodeURIComponent(model)}` : "props", { signal })).json();
}

/** How many tokens the prompt of a conversation has. */
export async function countTokens(model, messages, signal) {
  const body = JSON.stringify({ model, messages });
  const headers = { "Content-Type": "application/json" };
  const response = await ask("v1/chat/completions/input_tokens", { method: "POST", signal, headers, body });
  return (await response.json()).input_tokens;
}

/** Events of a stream: name and data of each. Comments are left out. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", name = "message", data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line.startsWith("event:")) name = line.slice(6).trim();
        else if (line === "") {
          if (data.length) yield { name, data: data.join("\n") };
          name = "message";
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // who stops reading ends the request
  }
}

/** Chunks of a streamed chat completion. */
export const chat = (request, signal) => stream("v1/chat/completions", request, signal);

/** The same where there is no chat template: the model continues the last message. */
export async function* complete({ messages, ...request }, signal) {
  const whole = { n_predict: -1, ...request, prompt: messages.at(-1).content };
  for await (const chunk of stream("v1/completions", whole, signal)) {
    yield { ...chunk, choices: chunk.choices.map(({ text, ...choice }) => ({ ...choice, delta: { content: text } })) };
  }
}

/** Chunks of a stream. One without its end is a problem. */
async function* stream(path, request, signal) {
  const response = await ask(path, {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, timings_per_token: true, return_progress: true }),
  });
  try {
    for await (const { name, data } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (name === "error") throw problemOf(chunk.error?.code ?? 500, chunk.error);
      yield chunk;
    }
  } catch (problem) {
    throw problem.name === "TypeError" ? cut() : problem; // what fetch says of a lost connection
  }
  throw cut();
}
