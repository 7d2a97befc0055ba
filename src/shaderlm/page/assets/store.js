// Conversations, kept in this browser: one entry of localStorage for each, so that tabs do not overwrite each other's.
//
// A conversation: {id, updated, settings, messages}. A message: {role, content}; an answer also has `thoughts`,
// `figures` (tokens, rate, first token; tokens in the context, and its size), `ended` (how), the `problem` that ended it,
// `isJson`, its `model`, the `first` message that the model saw, and how many turns were `leftOut` from there on.

const PREFIX = "shaderlm.chat.";

function storage() {
  try { return globalThis.localStorage; } catch { return null; } // a browser may forbid it
}

export class Store {
  #known = new Map();

  /** `failed` is called when the browser keeps nothing. */
  constructor(failed) {
    this.failed = failed;
    const found = storage();
    for (const name of found ? Object.keys(found) : []) {
      if (name.startsWith(PREFIX)) this.#read(name);
    }
    if (!found) failed("This browser keeps nothing for this page. Conversations end with it.");
  }

  #read(name) {
    try {
      const found = JSON.parse(storage().getItem(name));
      if (!Array.isArray(found.messages) || `${PREFIX}${found.id}` !== name) return;
      found.settings ??= {};
      this.#known.set(found.id, found);
    } catch { /* not a conversation: it stays where it is */ }
  }

  /** Another tab changed an entry. True: the list is another one. */
  changed(name) {
    if (name !== null && !name.startsWith(PREFIX)) return false;
    if (name === null || storage().getItem(name) === null) this.#known.delete(name?.slice(PREFIX.length));
    if (name === null) this.#known.clear();
    else if (storage().getItem(name) !== null) this.#read(name);
    return true;
  }

  /** All, the latest first. */
  list() {
    return [...this.#known.values()].sort((a, b) => b.updated - a.updated);
  }

  get(id) {
    return this.#known.get(id) ?? null;
  }

  /** A new one. It is kept with its first message. */
  create(settings) {
    const random = crypto.getRandomValues(new Uint32Array(2)); // randomUUID is for secure contexts only
    return { id: [...random].map((n) => n.toString(36)).join(""), updated: Date.now(), settings, messages: [] };
  }

  save(conversation) {
    if (!conversation.messages.length) return;
    this.#known.set(conversation.id, conversation);
    try {
      storage()?.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    } catch {
      this.failed("The browser's space for this page is full. Delete conversations to keep new ones.");
    }
  }

  remove(id) {
    this.#known.delete(id);
    storage()?.removeItem(PREFIX + id);
  }
}

/** What a conversation is called: the beginning of its first message. */
export function titleOf(conversation) {
  const text = conversation.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const line = text.split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}
