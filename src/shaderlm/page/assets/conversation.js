// Draws a conversation: one article for each message, with what can be done to it. Knows neither sources nor storage.

import { copyButton, grow, make, sends } from "./dom.js";
import { showMarkdown } from "./markdown.js";
import { row } from "./pictures.js";
import { markdownOf } from "./texts.js";

const count = (n) => n.toLocaleString("en");

const ENDS = {
  length: "Ended at the limit of tokens, which is in the settings.",
  full: "Cut off: the context is full. The next message leaves out the oldest turns.",
  stopped: "Stopped.",
  left: "Cut off: the page was closed before the answer was complete.",
};

/** Time to first token, tokens per second, tokens. */
export function figuresOf({ firstToken, rate, tokens } = {}) {
  const found = [];
  if (firstToken !== undefined) {
    const text = firstToken < 1000 ? `${Math.round(firstToken)} ms` : `${(firstToken / 1000).toFixed(2)} s`;
    found.push(`first token after ${text}`);
  }
  if (rate) found.push(`${rate < 100 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`);
  if (tokens) found.push(tokens === 1 ? "1 token" : `${count(tokens)} tokens`);
  return found.join(" · ");
}

export class ConversationView {
  #parts = new WeakMap(); // message → the elements that change
  #opened = new WeakSet(); // messages whose thoughts people read

  /** actions: edit(message, text) and regenerate(), which is also what "Try again" does. */
  constructor(root, actions) {
    Object.assign(this, { root, actions });
  }

  /** Draw all messages. `running`: the answer that is being written, if there is one. */
  show(conversation, model, running) {
    this.conversation = conversation;
    this.model = model;
    this.running = running;
    this.root.replaceChildren(...conversation.messages.map((message) => this.#article(message)));
  }

  #article(message) {
    const user = message.role === "user";
    const name = user ? "You" : (message.model ?? this.model ?? "Answer");
    const article = make("article", { class: message.role, tabindex: -1 }, make("h2", {}, name));
    const body = make("div", { class: user ? "text" : "markdown" });
    const parts = { article, body };
    this.#parts.set(message, parts);
    if (user) {
      body.textContent = message.content;
      parts.actions = make("div", { class: "actions" }, ...this.#userActions(message, parts));
      if (message.images?.length) article.append(row(message.images));
      article.append(body, parts.actions);
    } else {
      parts.leftOut = make("p", { class: "left-out" });
      parts.thoughts = make("div", { class: "markdown" });
      const toggle = ({ target }) => (target.open ? this.#opened.add(message) : this.#opened.delete(message));
      const open = this.#opened.has(message);
      const summary = make("summary", {}, "Thoughts");
      parts.thinking = make("details", { class: "thoughts", open, toggle }, summary, parts.thoughts);
      parts.progress = make("p", { class: "soft waiting" });
      parts.problem = make("div", { class: "problem", role: "alert" });
      parts.figures = make("p", { class: "figures" });
      parts.actions = make("div", { class: "actions" });
      const foot = make("div", { class: "foot" }, parts.figures, parts.actions);
      article.append(parts.leftOut, parts.thinking, body, parts.progress, parts.problem, foot);
      this.update(message);
    }
    return article;
  }

  // A person's message -----------------------------------------------------------------------------------

  #userActions(message, parts) {
    const edit = make("button", { type: "button", class: "plain", click: () => this.#edit(message, parts) }, "Edit");
    return this.running ? [] : [copyButton(() => message.content, "Copy message"), edit].filter(Boolean);
  }

  #edit(message, parts) {
    const isLast = this.conversation.messages.indexOf(message) >= this.conversation.messages.length - 2;
    const note = isLast ? null : make("p", { class: "soft" }, "What follows this message is replaced.");
    const area = make("textarea", { "aria-label": "Edit your message", rows: 1, input: () => grow(area) });
    area.value = message.content;
    const close = () => {
      form.replaceWith(parts.body, parts.actions);
      parts.actions.querySelector("button:last-child")?.focus();
    };
    const send = () => (area.value.trim() || message.images?.length ? this.actions.edit(message, area.value.trim()) : area.focus());
    const cancel = make("button", { type: "button", click: close }, "Cancel");
    const form = make("form", { class: "edit", submit: (event) => { event.preventDefault(); send(); } },
      area, note, make("div", { class: "row" }, cancel, make("button", { class: "main" }, "Send")));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (sends(event)) { event.preventDefault(); send(); }
    });
    parts.actions.remove();
    parts.body.replaceWith(form);
    grow(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  // An answer --------------------------------------------------------------------------------------------

  /** Draw again what changed of an answer. */
  update(message) {
    const parts = this.#parts.get(message);
    if (!parts) return; // another conversation is shown
    const isRunning = message === this.running;
    parts.article.classList.toggle("running", isRunning);
    parts.article.setAttribute("aria-busy", String(isRunning));
    parts.leftOut.textContent = leftOutText(message);
    parts.leftOut.hidden = !parts.leftOut.textContent;
    parts.thinking.hidden = !message.thoughts;
    if (message.thoughts) showMarkdown(parts.thoughts, message.thoughts);
    showMarkdown(parts.body, markdownOf(message));
    parts.figures.textContent = this.#figures(message, isRunning);
    parts.progress.hidden = !isRunning || message.content !== "";
    parts.progress.textContent = message.thoughts ? "Thinking…" : progressText(message.progress);
    if (!isRunning || !parts.actions.childNodes.length) this.#end(message, parts, isRunning);
  }

  #figures(message, isRunning) {
    const end = isRunning || message.problem || !Object.hasOwn(ENDS, message.ended) ? null : ENDS[message.ended];
    return [figuresOf(message.figures), end].filter(Boolean).join(" · ");
  }

  #end(message, parts, isRunning) {
    const isLast = this.conversation.messages.at(-1) === message;
    const click = () => this.actions.regenerate();
    const again = (label) => make("button", { type: "button", class: "plain", click }, label);
    parts.problem.hidden = isRunning || !message.problem;
    parts.problem.replaceChildren();
    if (!isRunning && message.problem) {
      parts.problem.append(make("p", {}, make("b", {}, message.problem.title), ` ${message.problem.advice}`));
      if (isLast && message.problem.kind !== "context") parts.problem.append(again("Try again"));
    }
    const copy = message.content ? copyButton(() => message.content, "Copy answer") : null;
    const regenerate = isLast && !message.problem ? again("Regenerate") : null;
    parts.actions.replaceChildren(...(isRunning ? [] : [copy, regenerate].filter(Boolean)));
  }
}

function leftOutText({ leftOut, figures }) {
  if (!leftOut || !figures?.context) return "";
  const turns = leftOut === 1 ? "turn is" : `${count(leftOut)} turns are`;
  return `The context of ${count(figures.context)} tokens is full: the oldest ${turns} left out from here on.`;
}

function progressText(progress) {
  if (progress?.stage === "load") return "Waiting for the model…";
  if (!progress || progress.done >= progress.total) return "Waiting for the first token…";
  const { stage, done, total } = progress;
  if (stage === "pictures") return `Reading the pictures: ${count(done + 1)} of ${count(total)}…`;
  if (stage === "compile") return `Compiling shaders, once for this visit: ${count(done)} of ${count(total)}…`;
  return `Reading the prompt: ${count(done)} of ${count(total)} tokens…`;
}
