// Conversations, kept in this browser: one entry of localStorage for each, so that tabs do not overwrite each other's.
//
// A conversation: {id, updated, title, settings, messages}; without a title, its first message names it. A message:
// {role, content}; of a person also `images`, as data URLs of 1,024 pixels at most; an answer also has `thoughts`, `figures` (tokens, rate, first token; tokens in the context, and its
// size), `ended` (how), the `problem` that ended it, `isJson`, its `model`, the `first` message that the model saw, and
// how many turns were `leftOut` from there on.

const PREFIX = "shaderlm.chat.";

function storage() {
  try { return globalThis.localStorage; } catch { return null; } // a browser may forbid it
}

export class StorageFullError extends Error {}

// randomUUID is for secure contexts only.
const newId = () => [...crypto.getRandomValues(new Uint32Array(2))].map((n) => n.toString(36)).join("");

const saysTheSame = (a, b) => {
  const text = ({ title, messages }) => JSON.stringify([title, messages.map(({ role, content }) => [role, content])]);
  return text(a) === text(b);
};

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
    return { id: newId(), updated: Date.now(), settings, messages: [] };
  }

  save(conversation) {
    if (!conversation.messages.length) return;
    if (!this.#write(conversation)) {
      this.failed("The browser's space for this page is full. Delete conversations to keep new ones.");
    }
  }

  /** False: there is no space to keep it for later. */
  #write(conversation) {
    this.#known.set(conversation.id, conversation);
    try {
      storage()?.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
      return true;
    } catch {
      return false;
    }
  }

  /** Add conversations of a file, all or none; those that are here already are left out. Returns how many are new. */
  add(conversations) {
    const added = [];
    for (const each of conversations) {
      const known = each.id === null ? null : this.get(each.id);
      if (known && saysTheSame(known, each)) continue;
      added.push({ ...each, id: known || each.id === null ? newId() : each.id });
      if (this.#write(added.at(-1))) continue;
      for (const { id } of added) this.remove(id);
      throw new StorageFullError();
    }
    return added.length;
  }

  remove(id) {
    this.#known.delete(id);
    storage()?.removeItem(PREFIX + id);
  }
}
