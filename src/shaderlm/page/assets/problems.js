// What can go wrong, in words for people: what happened, and what to do.

export class Problem extends Error {
  constructor(kind, title, advice, wait = null) {
    super(title);
    Object.assign(this, { kind, title, advice, wait });
  }

  /** What is kept with a message. */
  record() {
    return { kind: this.kind, title: this.title, advice: this.advice };
  }
}

export const offline = () => new Problem(
  "offline", "The server does not answer.", "Is it still running? Start it with shaderlm serve, then try again.",
);

export const cut = () => new Problem(
  "cut", "The connection was lost before the answer was complete.", "Try again for a whole answer.",
);

const count = (n) => Number(n).toLocaleString("en");

export const unseen = () => new Problem(
  "images", "This model does not read pictures.", "Choose one that does, or start a new chat without them.",
);

/** A message that does not fit, even alone. */
export const tooLong = (used, context, hasSystem) => new Problem(
  "context", "This message is longer than the model can read.",
  `It has ${count(used)} tokens${hasSystem ? " with the system prompt" : ""}, and ${count(context)} is the most. Shorten it: `
    + `Edit changes the message${hasSystem ? ", Settings the system prompt" : ""}.`,
);

const seconds = (n) => (n === 1 ? "1 second" : `${n} seconds`);

/** The problem of a response that is an error, or of an error event: its status, its `error`, its Retry-After. */
export function problemOf(status, error = {}, wait = null) {
  const said = sentence(error.message ?? `The server answered with status ${status}.`);
  const later = wait ? `Try again in ${seconds(wait)}.` : "Try again in a while.";
  if (error.type === "exceed_context_size_error") {
    const size = `It has ${count(error.n_prompt_tokens)} tokens, and ${count(error.n_ctx)} is the most.`;
    const advice = "Edit an earlier message, shorten the system prompt, or start a new chat.";
    return new Problem("context", "The conversation is longer than the model can read.", `${size} ${advice}`);
  }
  if (status === 400 && error.param === "response_format") {
    return new Problem("refused", "The server cannot honour the JSON schema.", `Change it in the settings. ${said}`);
  }
  if (status === 401) return new Problem("key", "The server needs a key.", "Enter the key that it was started with.");
  if (status === 403) return new Problem("origin", "The server does not accept this page.", said);
  if (status === 429) return new Problem("busy", "The server is busy, and its queue is full.", later, wait);
  if (status === 503) return new Problem("unavailable", "The server cannot answer yet.", said, wait);
  if (status >= 500) return new Problem("server", "The server failed.", said);
  return new Problem("refused", "The server refused the request.", said);
}

// A name of a field stays as it is.
export function sentence(text) {
  const first = /^[a-z]+[ ,:]/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return /[.!?]$/.test(first) ? first : `${first}.`;
}
