// Gets one answer: asks a source, and puts what comes into the message. Knows no page, and not which source it is.

import { firstThatFits, turns } from "./context.js";
import { Problem, unseen } from "./problems.js";
import { requestFields } from "./settings.js";

export class Answer {
  #abort = new AbortController();

  constructor(conversation, message) {
    Object.assign(this, { conversation, message });
  }

  stop() {
    this.#abort.abort();
  }

  /** Until the end, however it comes. `changed` is called after each part. Only faults of the page are thrown. */
  async run(source, changed) {
    const { message, conversation } = this;
    const before = conversation.messages.slice(0, conversation.messages.indexOf(message));
    const start = performance.now();
    try {
      message.progress = { stage: "load" };
      changed();
      const session = await source.open(conversation.settings.model, this.#abort.signal);
      delete message.progress;
      message.model = session.model;
      if (session.isChosen) conversation.settings.model = session.model; // it stays with the conversation
      const fields = requestFields(conversation.settings, session.defaults, source.hasSchemas);
      if (fields.response_format) message.isJson = true;
      const first = await this.#first(session, before, fields.max_tokens);
      const sent = before.slice(first);
      if (!session.sees && sent.some(({ images }) => images?.length)) throw unseen();
      const request = { ...fields, messages: turns(sent, conversation.settings.system) };
      for await (const chunk of session.chat(request, this.#abort.signal)) {
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

  /** The first message that the model sees. What is left out for this answer is noted in it. */
  async #first({ context, count }, before, answer) {
    const { message, conversation } = this;
    const old = before.findLast((each) => each.first)?.first ?? 0;
    if (!context) return old;
    message.figures.context = context;
    const how = { system: conversation.settings.system, answer, context };
    const first = await firstThatFits(before, old, { ...how, count: (sent) => count(sent, this.#abort.signal) });
    if (first) message.first = first;
    message.leftOut = before.slice(old, first).filter(({ role }) => role === "user").length;
    return first;
  }

  #take(chunk, start) {
    const { message } = this;
    const { delta = {}, finish_reason: reason } = chunk.choices[0] ?? {};
    if (chunk.model) message.model = chunk.model;
    if (chunk.prompt_progress) {
      const { processed: done, total } = chunk.prompt_progress;
      message.progress = { stage: "prompt", done, total };
    }
    if (chunk.progress) message.progress = chunk.progress;
    if (delta.reasoning_content) message.thoughts = (message.thoughts ?? "") + delta.reasoning_content;
    if (delta.content) message.content += delta.content;
    if (delta.content || delta.reasoning_content) message.figures.firstToken ??= performance.now() - start;
    if (chunk.timings) {
      const { cache_n: cached = 0, prompt_n: read = 0, predicted_n: tokens, predicted_per_second: rate } = chunk.timings;
      Object.assign(message.figures, { tokens, rate, used: cached + read + tokens });
    }
    const isFull = reason === "length" && message.figures.used >= message.figures.context;
    if (reason) message.ended = isFull ? "full" : reason;
  }
}
