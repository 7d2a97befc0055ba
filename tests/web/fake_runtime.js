// Stands for shaderlm.js in tests of the page: the same functions without a model. `fake` of plan.json says how it
// behaves: milliseconds for each word and file, where it fails, what it warns of, and which GPU the page finds.

const CACHE = "fake weights";

export class ShaderlmError extends Error {
  constructor(code, message) {
    super(message);
    this.code = code;
  }
}

async function planOf(url) {
  return (await fetch(new URL("plan.json", url))).json();
}

const weightsOf = (plan) => plan.files.filter(({ name }) => name.startsWith("weights-"));
const keyOf = ({ sha256 }) => new URL(`/.fake/${sha256}`, location.href);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** A GPU for the page to find, whether there is one or not. */
function pretend({ gpu = "fake" }) {
  const found = { fake: { requestAdapter: async () => ({}) }, none: undefined }[gpu];
  if (gpu !== "real") Object.defineProperty(navigator, "gpu", { value: found, configurable: true });
}

export async function cached(url) {
  pretend((await planOf(url)).fake);
  const cache = await caches.open(CACHE);
  const found = await Promise.all(weightsOf(await planOf(url)).map((file) => cache.match(keyOf(file))));
  return found.every(Boolean);
}

export async function load(url, { onProgress }) {
  const plan = await planOf(url);
  const { fake, model } = plan;
  const files = weightsOf(plan);
  const total = files.reduce((sum, { bytes }) => sum + bytes, 0);
  const cache = await caches.open(CACHE);
  let done = 0;
  onProgress({ stage: "plan", done: 1, total: 1 });
  for (const file of files) {
    const { name, bytes } = file;
    onProgress({ stage: "weights", done, total });
    if (!(await cache.match(keyOf(file)))) {
      const response = await fetch(new URL(name, url)).catch(() => null);
      if (!response?.ok) throw new ShaderlmError("fetch", `${name} has status ${response?.status ?? 0}`);
      if (fake.cached !== "memory") await cache.put(keyOf(file), response);
    }
    await pause(fake.load ?? 0);
    onProgress({ stage: "weights", done: done += bytes, total });
  }
  if (fake.fails?.load) throw new ShaderlmError(fake.fails.load, fake.fails.message ?? "");
  onProgress({ stage: "compile", done: 1, total: 3 });
  onProgress({ stage: "ready", done: 1, total: 1 });
  return new Model(model, fake);
}

/** The text of a message, in which a picture is the beginning of its address. */
function textOf({ content }) {
  if (typeof content === "string") return content;
  return content.map((part) => part.text ?? part.image_url.url.slice(0, 15)).join(" ");
}

class Model {
  constructor({ name, architecture, weight_bytes: weightBytes, context }, fake) {
    this.fake = fake;
    this.last = null;
    this.lost = new Promise((resolve) => { this.lose = resolve; });
    const { cached: kept = "cache", warnings = [] } = fake;
    this.info = { name, architecture, weightBytes, context, variant: "portable", device: "Fake GPU 1", cached: kept, warnings, chat: fake.chat ?? true };
  }

  async *chat(messages, options) {
    const questions = messages.filter(({ role }) => role === "user");
    const said = textOf(questions.at(-1));
    const { max_tokens: most = Infinity, signal, onProgress } = options;
    const text = said === "options" ? JSON.stringify({ ...options, signal: undefined, onProgress: undefined }) : said === "long" ? "word ".repeat(60) : `${questions.length}: ${this.fake.replies ?? ""}${said}`;
    const words = text.match(/\S+\s*/g);
    const begin = performance.now();
    const promptTokens = this.tokenizeChat(messages).length;
    this.last = { completionTokens: 0, promptTokens, finishReason: null };
    for (const progress of [{ stage: "compile", done: 1, total: 3 }, { stage: "prompt", done: 2, total: promptTokens }]) {
      onProgress(progress);
      await pause(this.fake.prompt ?? 0);
    }
    for (const word of words) {
      if (this.last.completionTokens >= most) break;
      await pause(this.fake.word ?? 0);
      if (signal.aborted) return void Object.assign(this.last, { finishReason: "abort" });
      this.last.completionTokens += 1;
      const ms = Math.max(1, performance.now() - begin); // a browser's clock may stand still for a word
      Object.assign(this.last, { tokensPerSecond: (1000 * this.last.completionTokens) / ms });
      yield word;
      if (this.fake.fails?.chat && said === "fail") {
        const problem = new ShaderlmError(this.fake.fails.chat, this.fake.fails.message ?? "");
        this.lose(problem);
        throw problem;
      }
    }
    const finishReason = this.last.completionTokens < words.length ? "length" : "stop";
    Object.assign(this.last, { finishReason });
  }

  /** A token for each word, and two for each message. */
  tokenizeChat(messages) {
    return messages.flatMap((message) => [0, ...textOf(message).split(/\s+/), 0]);
  }

  complete(prompt, options) {
    return this.chat([{ role: "user", content: `complete ${prompt}` }], options);
  }
}
