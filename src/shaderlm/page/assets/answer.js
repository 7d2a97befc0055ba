// Gets one answer: asks a source, and puts what comes into the message. Knows no page, and not which source it is.

import { Problem } from "./problems.js";
import { requestFields } from "./settings.js";

/** The conversation as a source takes it. Answers that failed are left out; what a person said twice is joined. */
export function turns(messages, system) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const { role, content } of messages) {
    if (!content) continue;
    if (role === "user" && found.at(-1)?.role === "user") found.at(-1).content += `\n\n${content}`;
    else found.push({ role, content });
  }
  return found;
}

export class Answer {
  #abort = new AbortController();

  constructor(conversation, message) {
    Object.assign(this, { conversation, message });
  }

  stop() {
    this.#abort.abort();
  }

  /** Until the end, however it comes. `changed` is called after each part. Only faults of the page are thrown. */
  async run({ chat, defaults, hasSchemas }, changed) {
    const { message, conversation } = this;
    const before = conversation.messages.slice(0, conversation.messages.indexOf(message));
    const start = performance.now();
    try {
      const fields = requestFields(conversation.settings, defaults, hasSchemas);
      if (fields.response_format) message.isJson = true;
      const request = { ...fields, messages: turns(before, conversation.settings.system) };
      for await (const chunk of chat(request, this.#abort.signal)) {
        this.#take(chunk, start);
        changed();
      }
    } catch (problem) {
      if (problem.name === "AbortError") message.ended = "stopped";
      else if (problem instanceof Problem) Object.assign(message, { ended: "problem", problem: problem.record() });
      else throw problem;
    } finally {
      delete message.progress;
      conversation.updated = Date.now();
    }
  }

  #take(chunk, start) {
    const { message } = this;
    const { delta = {}, finish_reason: reason } = chunk.choices[0] ?? {};
    if (chunk.model) message.model = chunk.model;
    if (chunk.prompt_progress) {
      message.progress = { done: chunk.prompt_progress.processed, total: chunk.prompt_progress.total };
    }
    if (delta.reasoning_content) message.thoughts = (message.thoughts ?? "") + delta.reasoning_content;
    if (delta.content) message.content += delta.content;
    if (delta.content || delta.reasoning_content) message.figures.firstToken ??= performance.now() - start;
    if (chunk.timings) {
      message.figures.tokens = chunk.timings.predicted_n;
      message.figures.rate = chunk.timings.predicted_per_second;
    }
    if (reason) message.ended = reason;
  }
}
