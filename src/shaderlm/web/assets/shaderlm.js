// Runs models that `shaderlm export-web` wrote, with WebGPU: in pages, in workers and in Node.
//
//   import { load } from "./shaderlm.js";
//   const model = await load("https://example.org/model/", { onProgress: console.log });
//   for await (const text of model.chat([{ role: "user", content: "What is gravity?" }])) console.log(text);
//
// It knows neither models nor ops. plan.json has shaders, buffers and lists of dispatches: "bodies", from token ids to
// hidden states, and "heads", from there to a sampled token. docs/web.md describes it; shaderlm.d.ts has the types.

import { TemplateError, templateFunction } from "./template.js";
import { Tokenizer } from "./tokenizer.js";

const FORMAT = 2; // of plan.json
const STEPS_AHEAD = 3; // steps on their way: the device never waits for the host to look at a token
const STEPS_AT_ONCE = 4; // steps of one submission, where they are short; their tokens come back together
const FRAME = 4; // milliseconds that tokens of one submission may take: nobody sees that they come together
const LOSS_IS_SAID = 5000; // milliseconds after the first call that fails on a lost device, at most
const DISPATCHES = 48; // of a prompt that are submitted at a time: the device begins while the rest is encoded

// Errors ----------------------------------------------------------------------------------------------------

/** What went wrong (`code`), and what to do about it (`message`). */
export class ShaderlmError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = "ShaderlmError";
    this.code = code;
  }
}

const IN_NODE = !globalThis.location && Boolean(globalThis.process?.versions?.node);

const aborted = () => new ShaderlmError("aborted", "loading was aborted by its signal; call load() again to go on");

function explained(problem, doing) {
  if (problem instanceof ShaderlmError) return problem;
  const said = problem?.message ?? String(problem);
  if (isOutOfMemory(problem)) return outOfMemory(`${doing} needs more memory than there is (${said})`, problem);
  return new ShaderlmError("internal", `${doing} failed: ${said}. Please report this with the model's name`, {
    cause: problem,
  });
}

/** Is it the error of an array that is too large, or of a GPU buffer that is? */
function isOutOfMemory(problem) {
  const isArray = problem instanceof RangeError && /alloc|array buffer/i.test(problem.message);
  return isArray || Boolean(globalThis.GPUOutOfMemoryError && problem instanceof GPUOutOfMemoryError);
}

function outOfMemory(said, cause) {
  const todo = "Close other programs and tabs, or take a smaller model";
  return new ShaderlmError("out-of-memory", `${said}. ${todo}`, { cause });
}

// Files -----------------------------------------------------------------------------------------------------

const CACHE = "shaderlm"; // of the Cache API. A file is kept under its hash, whatever folder it came from
const ATTEMPTS = 2; // to get a file over the network

/** The files of an export, never with another hash than the plan says. */
class Files {
  constructor(folder, mode, signal) {
    this.folder = folder; // a URL
    this.signal = signal;
    this.warnings = [];
    this.complete = false; // are all files in the cache?
    this.old = []; // hashes of files that this folder had before
    this.cache = mode === "none" || this.folder.protocol === "file:" ? null : undefined; // undefined: not opened yet
  }

  async open() {
    if (this.cache === null || !globalThis.caches) return void (this.cache = null);
    try {
      this.cache = await caches.open(CACHE);
      this.complete = true;
    } catch (problem) {
      this.keepNothing(`the browser gives this page no cache (${problem.message})`);
    }
  }

  /** From now on nothing is kept. */
  keepNothing(reason) {
    this.cache = null;
    this.complete = false;
    this.warnings.push(`${reason}: the model is in memory only, and the next visit loads it again`);
  }

  key(name) {
    return new URL(`/.shaderlm/${name}`, this.folder).href;
  }

  async plan() {
    const parts = [];
    for await (const part of this.#network("plan.json", "no-cache")) parts.push(part);
    let plan;
    try {
      plan = JSON.parse(await new Blob(parts).text());
    } catch (problem) {
      const given = `${this.#where("plan.json")} is no JSON (${problem.message})`;
      throw new ShaderlmError("damaged", `${given}; is this the folder of an export?`);
    }
    if (plan.format !== FORMAT) {
      const given = `plan.json has the format ${plan.format}, this shaderlm.js reads ${FORMAT}`;
      throw new ShaderlmError("damaged", `${given}; take both from one export`);
    }
    return plan;
  }

  /** The bytes of a file, in `target` if it is given. `report(n)` is told how many came, from the cache too. */
  async read(file, report = () => {}, target = new Uint8Array(file.bytes)) {
    const bytes = target.subarray(0, file.bytes);
    const { cache } = this; // which is given up where it is full, meanwhile
    const found = await cache?.match(this.key(file.sha256)).catch(() => undefined);
    if (found) {
      const problem = await this.#fill(bytes, file, streamed(found.body), report).catch((error) => error.message);
      if (!problem) return { bytes, cached: true };
      this.#check();
      await cache.delete(this.key(file.sha256)).catch(() => {});
    }
    for (let attempt = 1; ; attempt++) {
      let failure;
      try {
        const problem = await this.#fill(bytes, file, this.#network(file.name, "no-store"), report);
        if (!problem) return { bytes, cached: false };
        const todo = "Load again; if that does not help, export the model again and copy all of its files";
        failure = new ShaderlmError("damaged", `${this.#where(file.name)} ${problem}. ${todo}`);
      } catch (error) {
        failure = error;
      }
      this.#check();
      if (attempt === ATTEMPTS || failure.final) throw failure;
    }
  }

  /** Keep the bytes of a file for the next visit. Never fails: it says so in `warnings`. */
  async keep(file, bytes) {
    if (!this.cache) return;
    try {
      await this.#put(file, bytes).catch(async (problem) => {
        if (problem.name !== "QuotaExceededError" || !(this.old.length || this.forgetting)) throw problem;
        await (this.forgetting ??= this.forgetOld()); // the storage may hold one version and not two
        await this.#put(file, bytes);
      });
    } catch (problem) {
      if (!this.cache || this.signal?.aborted) return; // another file said so already
      const full = problem.name === "QuotaExceededError";
      this.keepNothing(
        full ? "the browser's storage for this page is full" : `the browser could not keep a file (${problem.message})`,
      );
    }
  }

  async #put(file, bytes) {
    const headers = { "content-type": "application/octet-stream", "content-length": String(file.bytes) };
    let at = 0;
    const body = new ReadableStream({
      pull: (controller) => {
        if (this.signal?.aborted) controller.error(aborted());
        else if (at === bytes.length) controller.close();
        else controller.enqueue(bytes.slice(at, (at += Math.min(1 << 20, bytes.length - at))));
      },
    });
    await this.cache.put(this.key(file.sha256), new Response(body, { headers }));
  }

  /** Are all of these in the cache? They are not read. */
  async has(files) {
    if (!this.cache) return false;
    const found = await Promise.all(files.map((file) => this.cache.match(this.key(file.sha256)))).catch(() => [null]);
    return found.every(Boolean);
  }

  /** Note the hashes of this folder's files first: what a visit that ends early keeps is found again. */
  async list(files) {
    if (!this.cache) return;
    this.index = this.key(`index/${encodeURIComponent(this.folder.href)}`);
    this.hashes = files.map((file) => file.sha256);
    try {
      const before = (await (await this.cache.match(this.index))?.json()) ?? [];
      this.old = before.filter((hash) => !this.hashes.includes(hash));
      await this.cache.put(this.index, new Response(JSON.stringify([...this.hashes, ...this.old])));
    } catch {
      // The first file that cannot be kept says so.
    }
  }

  /** Delete what this folder had before and no other folder has. */
  async forgetOld() {
    if (!this.cache) return;
    const old = new Set(this.old);
    this.old = [];
    try {
      for (const request of old.size ? await this.cache.keys() : []) {
        if (!request.url.includes("/.shaderlm/index/") || request.url === this.index) continue;
        for (const hash of await (await this.cache.match(request)).json()) old.delete(hash);
      }
      for (const hash of old) await this.cache.delete(this.key(hash));
      await this.cache.put(this.index, new Response(JSON.stringify(this.hashes)));
    } catch {
      // Old files stay, which harms nobody but the disk.
    }
  }

  #check() {
    if (this.signal?.aborted) throw aborted();
  }

  #where(name) {
    return new URL(name, this.folder).href;
  }

  /** What is wrong with the bytes of a stream, or nothing. */
  async #fill(bytes, file, parts, report) {
    let at = 0;
    try {
      const problem = await this.#filled(bytes, file, parts, (count) => report(count, (at += count)));
      if (problem) report(-at);
      return problem;
    } catch (error) {
      report(-at);
      throw error;
    }
  }

  async #filled(bytes, file, parts, report) {
    const expected = file.bytes.toLocaleString("en");
    let at = 0;
    for await (const part of parts) {
      this.#check();
      if (at + part.length > bytes.length) return `has more than the ${expected} bytes that plan.json says`;
      bytes.set(part, at);
      at += part.length;
      report(part.length);
    }
    this.#check();
    if (at < bytes.length) return `ended after ${at.toLocaleString("en")} of ${expected} bytes`;
    return (await sha256(bytes)) === file.sha256 ? "" : "has other bytes than plan.json says (its SHA-256 differs)";
  }

  async *#network(name, cache) {
    const url = new URL(name, this.folder);
    if (url.protocol === "file:") {
      const { createReadStream } = await import("node:fs");
      try {
        yield* createReadStream(url, { highWaterMark: 1 << 20, signal: this.signal });
      } catch (problem) {
        this.#check();
        throw Object.assign(
          new ShaderlmError(
            "fetch",
            `cannot read ${url.pathname} (${problem.message}); give load() the folder of an export`,
          ),
          { final: true },
        );
      }
      return;
    }
    let response;
    try {
      response = await fetch(url, { cache, signal: this.signal });
      if (response.ok) yield* streamed(response.body);
    } catch (problem) {
      this.#check();
      throw new ShaderlmError(
        "fetch",
        `cannot get ${url.href} (${problem.message}); check the connection and load again`,
        { cause: problem },
      );
    }
    if (!response.ok) {
      const todo =
        response.status === 404
          ? "the address must be that of an export's folder, with all of its files"
          : "try again later";
      const error = new ShaderlmError(
        "fetch",
        `${url.href}: the server answers ${response.status} ${response.statusText}; ${todo}`,
      );
      throw Object.assign(error, { final: response.status < 500 });
    }
  }
}

/** The URL of a folder, given its address, or in Node its path. */
async function folderOf(given) {
  try {
    let url = given;
    if (IN_NODE && typeof given === "string" && !/^\w{2,}:/.test(given)) {
      const { pathToFileURL } = await import("node:url");
      url = pathToFileURL(given);
    }
    const folder = new URL(url, globalThis.location?.href);
    folder.pathname = folder.pathname.replace(/\/plan\.json$/, "").replace(/\/*$/, "/");
    return folder;
  } catch {
    throw new ShaderlmError("input", `load() needs the address of an export's folder, got ${String(given)}`);
  }
}

/** The parts of a stream. (Not every browser can iterate over it.) */
async function* streamed(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {}); // of no use after the end; after an error nobody wants the rest
  }
}

async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Text ------------------------------------------------------------------------------------------------------

/** Text ↔ token ids, and messages → text. */
class Text {
  constructor(about, tokenizer, template) {
    this.about = about;
    this.template = template && compiled(template);
    this.tokenizer = tokenizer && new Tokenizer(tokenizer, about);
    // The longest first: one may begin with another.
    const special = Object.keys(about.special_tokens ?? {});
    this.specialTexts = special.filter((text) => text.length > 1).sort((a, b) => b.length - a.length);
  }

  /** Token ids. parseSpecial: the text of a special token is that token. A mark within it keeps it from being one. */
  encode(text, { parseSpecial = true, mark = "" } = {}) {
    if (!this.tokenizer) throw new ShaderlmError("input", "this export has no tokenizer; give token ids to complete()");
    if (typeof text !== "string") throw new ShaderlmError("input", `a text must be a string, got ${typeof text}`);
    if (/\p{Surrogate}/u.test(text)) {
      throw new ShaderlmError(
        "input",
        "a text must be valid Unicode; this one holds half a character (a lone surrogate)",
      );
    }
    try {
      return this.tokenizer.encode(text, { parseSpecial, mark });
    } catch (problem) {
      if (!(problem instanceof RangeError)) throw problem;
      const what = "a text has a word of millions of characters, which the browser's regular expressions do not take";
      throw new ShaderlmError("input", `${what} (${problem.message}). Put spaces or line ends into it`, { cause: problem });
    }
  }

  /** The bytes that a token adds to a text. */
  bytesOf(id, shown) {
    return this.tokenizer?.bytesOf(id, shown) ?? new Uint8Array();
  }

  decode(ids) {
    return this.tokenizer?.decode(ids) ?? "";
  }

  /**
   * The token ids of a conversation. Special tokens in messages are text; those of the template are tokens. `expand`
   * changes what the template gave; with it, a content may have parts.
   */
  encodeChat(messages, kwargs, parseSpecial, expand) {
    checkMessages(messages, expand);
    if (!this.template) {
      throw new ShaderlmError("input", "this model has no chat template; use complete() to continue a text");
    }
    const contents = [...texts(messages)].join("\n");
    const mark = unusedCharacter(contents);
    const present = this.specialTexts.filter((text) => contents.includes(text));
    const render = (given) => (expand ?? String)(this.#render(given, kwargs));
    if (parseSpecial || !present.length) return this.encode(render(messages));
    const pattern = new RegExp(present.map((text) => text.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")).join("|"), "gu");
    const marked = (content) => {
      // Again and again: special tokens may overlap.
      for (let before = null; before !== content;) {
        before = content;
        content = content.replace(pattern, (found) => {
          const first = String.fromCodePoint(found.codePointAt(0));
          return first + mark + found.slice(first.length);
        });
      }
      return content;
    };
    return this.encode(render(mapped(messages, marked)), { mark });
  }

  #render(messages, kwargs) {
    const { bos_token, eos_token } = this.about;
    const own = { messages, add_generation_prompt: true, tools: null, documents: null, bos_token, eos_token };
    const [, month, day, year] = new Date().toDateString().split(" ");
    const dates = { date_string: `${day} ${month} ${year}`, datetime: `${month} ${day} ${year}` };
    const taken = Object.keys(kwargs).find((name) => name in own);
    if (taken) throw new ShaderlmError("input", `the template's variable ${taken} is set by other means; leave it out`);
    try {
      return this.template({ ...dates, ...own, ...kwargs });
    } catch (problem) {
      if (!(problem instanceof TemplateError)) throw problem;
      const what = problem.refuses ? "refuses this conversation" : "fails";
      const said = `the chat template of this model ${what}: ${problem.message}`;
      throw new ShaderlmError("input", said, { cause: problem });
    }
  }
}

const newDecoder = () => new TextDecoder("utf-8", { ignoreBOM: true });

/** The function of a compiled template. */
function compiled(template) {
  try {
    return templateFunction(template);
  } catch (problem) {
    const todo = "take shaderlm.js and all other files from one export";
    const said = `the chat template cannot be read (${problem.message}); ${todo}`;
    throw new ShaderlmError("damaged", said, { cause: problem });
  }
}

function checkMessages(messages, hasParts) {
  if (!Array.isArray(messages) || !messages.length) {
    throw new ShaderlmError(
      "input",
      'messages must be a list of at least one message: [{ role: "user", content: "…" }]',
    );
  }
  messages.forEach((message, i) => {
    if (!["system", "user", "assistant", "tool"].includes(message?.role)) {
      throw new ShaderlmError(
        "input",
        `message ${i} must have a role of system, user, assistant, tool; got ${message?.role}`,
      );
    }
    if (typeof message.content !== "string" && !(hasParts && Array.isArray(message.content))) {
      throw new ShaderlmError(
        "input",
        `message ${i} must have a content that is a string, got ${typeof message.content}`,
      );
    }
  });
}

/** All strings within lists and objects. */
function* texts(value) {
  if (typeof value === "string") yield value;
  else if (value && typeof value === "object") for (const each of Object.values(value)) yield* texts(each);
}

/** The same lists and objects with other strings in them. */
function mapped(value, change) {
  if (typeof value === "string") return change(value);
  if (Array.isArray(value)) return value.map((each) => mapped(each, change));
  if (!value || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, each]) => [key, mapped(each, change)]));
}

function unusedCharacter(contents) {
  let code = 0xf0000; // for private use
  while (contents.includes(String.fromCodePoint(code))) code++;
  return String.fromCodePoint(code);
}

/** Generated text: whole characters only, and nothing that may still become a stop string. */
class TextStream {
  constructor(text, stop, shown) {
    Object.assign(this, { text, stop, shown, held: "", stopped: false });
    this.decoder = newDecoder();
  }

  /** The text that this token makes certain. */
  push(id) {
    const added = this.decoder.decode(this.text.bytesOf(id, this.shown), { stream: true });
    if (!this.stop.length) return added;
    const text = this.held + added;
    const ends = this.stop.map((each) => text.indexOf(each)).filter((at) => at >= 0);
    this.stopped = ends.length > 0;
    const certain = this.stopped
      ? Math.min(...ends)
      : text.length - Math.max(...this.stop.map((each) => overlap(text, each)));
    this.held = this.stopped ? "" : text.slice(certain);
    return text.slice(0, certain);
  }

  /** What was held back. The beginning of a character whose end never came is left out. */
  finish() {
    return this.held;
  }
}

/** Length of the longest end of a text that is a beginning of `stop`. */
function overlap(text, stop) {
  for (let length = Math.min(text.length, stop.length - 1); length > 0; length--) {
    if (stop.startsWith(text.slice(text.length - length))) return length;
  }
  return 0;
}

// Device ----------------------------------------------------------------------------------------------------

// Of the WebGPU specification: Node has no GPUBufferUsage.
const [MAP_READ, COPY_SRC, COPY_DST, UNIFORM, STORAGE, COMPUTE] = [1, 4, 8, 64, 128, 4];
const ACCESS = { r: "read-only-storage", w: "storage", u: "uniform" };
const rounded = (size, to) => Math.ceil(size / to) * to;

// GPU objects that load() was given. Node's package frees its instance with this object, although adapters, devices and
// promises still use it: the process then crashes.
const gpus = new Set();

const NO_WEBGPU = IN_NODE
  ? "Node has no WebGPU of its own. Install the npm package webgpu, and give load() what its create([]) returns, as `gpu`"
  : "there is no WebGPU here. Use a recent Chrome, Edge, Safari or Firefox";

const NO_ADAPTER = IN_NODE
  ? "WebGPU finds no GPU on this machine. Install or update its graphics driver; on Linux that is a Vulkan driver " +
    "(`vulkaninfo --summary` lists what it finds)"
  : "the browser offers no GPU. Update the graphics driver, and turn on hardware acceleration in the browser's settings " +
    "(chrome://gpu says why)";

/** An adapter, and the language features that its WGSL may have. */
async function requestAdapter(given) {
  if (!given && globalThis.isSecureContext === false) {
    throw new ShaderlmError(
      "insecure",
      "browsers compute on the GPU only for pages from https:// or from localhost; open this page from such an address",
    );
  }
  const gpu = given ?? globalThis.navigator?.gpu;
  if (!gpu) throw new ShaderlmError("no-webgpu", NO_WEBGPU);
  if (given) gpus.add(given);
  const adapter = await gpu.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new ShaderlmError("no-adapter", NO_ADAPTER);
  return { adapter, language: gpu.wgslLanguageFeatures ?? new Set() };
}

/** Why an adapter cannot run a variant; "" if it can. */
function unsupportedReason(variant, adapter, language) {
  const { features, limits, info = {} } = adapter;
  const missing = variant.features.find((name) => !features.has(name));
  if (missing) return `it lacks the feature ${missing}`;
  const unknown = variant.language?.find((name) => !language.has(name));
  if (unknown) return `its WGSL lacks ${unknown}`;
  const small = Object.entries(variant.limits).find(([name, least]) => !(limits[name] >= least));
  if (small) return `its ${small[0]} is ${limits[small[0]]}, and ${small[1]} is needed`;
  const size = variant.subgroup_size;
  if (size && !(info.subgroupMinSize === size && info.subgroupMaxSize === size)) {
    return `its subgroups have ${info.subgroupMinSize} to ${info.subgroupMaxSize} threads, not ${size}`;
  }
  const offered = Array.from(info.subgroupMatrixConfigs ?? []);
  const has = ({ component, result, m, n, k }) =>
    offered.some(
      (each) =>
        each.componentType === component && each.resultComponentType === result && each.M === m && each.N === n && each.K === k,
    );
  const lacks = variant.matrix?.find((shape) => !has(shape));
  return lacks ? `it has no matrices of ${lacks.m}×${lacks.n}×${lacks.k} ${lacks.component}` : "";
}

/** Does an adapter compute on the CPU? */
function isSoftware({ isFallbackAdapter, info = {} }) {
  const named = `${info.architecture} ${info.device} ${info.description}`;
  return Boolean(info.isFallbackAdapter || isFallbackAdapter || /swiftshader|llvmpipe/i.test(named));
}

/** The variants to try, best first: those for software on adapters that are software, and on no others. */
function candidates(variants, adapter, name) {
  if (name === undefined) {
    const software = variants.filter((variant) => isSoftware(adapter) && variant.software);
    return [...software, ...variants.filter((variant) => !variant.software)];
  }
  const named = variants.filter((variant) => variant.name === name);
  if (named.length) return named;
  const names = variants.map((variant) => variant.name).join(", ");
  throw new ShaderlmError("input", `this export has the variants ${names}; got ${name}`);
}

/** A device for the first variant that it can run, and the adapter it comes from. */
async function openDevice(gpu, plan, name, failed) {
  const reasons = [];
  const warnings = [];
  let { adapter, language } = await requestAdapter(gpu);
  for (const variant of candidates(plan.variants, adapter, name)) {
    let reason = failed.get(variant.name) ?? "";
    const tried = Boolean(reason);
    reason ||= unsupportedReason(variant, adapter, language);
    if (!reason) {
      let device = null;
      try {
        device = await adapter.requestDevice({ requiredFeatures: variant.features, requiredLimits: variant.limits });
        reason = await wrongLanes(variant, plan, device);
        if (!reason) return { adapter, device, variant, warnings };
      } catch (problem) {
        reason = problem.message;
      }
      device?.destroy();
      warnings.push(`this GPU does not run the variant ${variant.name}: ${reason}`);
      ({ adapter, language } = await requestAdapter(gpu)); // one gives one device
    } else if (tried) {
      warnings.push(`this GPU does not run the variant ${variant.name}: ${reason}`);
    }
    reasons.push(`${variant.name}: ${reason}`);
  }
  const why = `this GPU can run none of the variants of this export (${reasons.join("; ")})`;
  throw new ShaderlmError("no-variant", `${why}. Try another device or a smaller model`);
}

/**
 * Why kernels cannot rely on this device's subgroups; "" if they can. They expect that thread i of a workgroup is lane
 * i % size of its subgroup, which WGSL does not promise: the device is asked, for several sizes of workgroups.
 */
async function wrongLanes(variant, plan, device) {
  if (!variant.features.includes("subgroups")) return "";
  const most = device.limits.maxComputeInvocationsPerWorkgroup;
  for (const [hash, threads] of (plan.probes ?? []).filter(([, count]) => count <= most)) {
    const module = device.createShaderModule({ code: plan.shaders[hash].wgsl });
    const compute = { module, entryPoint: "main" };
    const pipeline = await device.createComputePipelineAsync({ layout: "auto", compute });
    const lanes = device.createBuffer({ size: 8 * threads, usage: STORAGE | COPY_SRC });
    const found = device.createBuffer({ size: 8 * threads, usage: MAP_READ | COPY_DST });
    const layout = pipeline.getBindGroupLayout(0);
    const encoder = device.createCommandEncoder();
    const pass = encoder.beginComputePass();
    pass.setPipeline(pipeline);
    pass.setBindGroup(0, device.createBindGroup({ layout, entries: [{ binding: 0, resource: { buffer: lanes } }] }));
    pass.dispatchWorkgroups(1);
    pass.end();
    encoder.copyBufferToBuffer(lanes, 0, found, 0, 8 * threads);
    device.queue.submit([encoder.finish()]);
    await found.mapAsync(MAP_READ);
    const table = new Uint32Array(found.getMappedRange()).slice(); // lane and size of every thread
    found.destroy();
    lanes.destroy();
    const size = table[1];
    const inOrder = table.every((value, i) => value === (i % 2 ? size : (i >> 1) % Math.max(1, size)));
    if (!inOrder) return `the lanes of its subgroups are not in order, in workgroups of ${threads}`;
    if (variant.subgroup_size && size !== variant.subgroup_size) return `its subgroups have ${size} threads`;
  }
  return "";
}

/** A device with the weights, the cache and the plans of one model, for one sequence. */
class Runner {
  constructor(device, plan, variant) {
    Object.assign(this, { device, plan, variant, queue: device.queue });
    this.page = plan.page;
    this.context = plan.model.context;
    this.capacity = 0; // positions that keys, values and tables have room for
    this.tableFirst = variant.table_first ?? 0; // where pages begin in the page table
    this.snapshots = new Map(); // of buffers of recurrent layers, by their numbers
    this.failure = null; // why nothing can run any more
    this.waiting = new Set(); // who is told of it
    this.idle = Promise.resolve(); // resolves when no answer is being generated
    this.failed = new Promise((resolve) => {
      this.fail = (error) => {
        this.failure ??= error;
        for (const end of this.waiting) end();
        resolve(this.failure);
      };
    });
    device.lost.then(({ message }) => {
      const todo = "Load the model again; if it happens again, close other programs or take a smaller model";
      this.fail(new ShaderlmError("device-lost", `the GPU was lost (${message || "no reason was given"}). ${todo}`));
    });
    device.onuncapturederror = ({ error }) => {
      const todo = "Please report this with the model's name and the GPU's";
      const refused = () => new ShaderlmError("internal", `the GPU refuses a command: ${error.message}. ${todo}`);
      this.fail(isOutOfMemory(error) ? outOfMemory(`the GPU's memory is full (${error.message})`, error) : refused());
    };
    this.buffers = new Array(variant.buffers.length); // as bindings take them
    this.numbers = new Map(variant.buffers.map(([name], i) => [name, i]));
    this.bodies = variant.bodies.toSorted((a, b) => a.rows - b.rows || a.keys - b.keys);
    this.maxRows = this.bodies.at(-1).rows;
    this.layouts = new Map(); // by the access of their bindings
    this.pipelines = new Map(); // by the hash of their shader: promises, and once they are there { pipeline, layout }
    this.groups = new Map(); // bind groups by layout and buffers
    this.bound = new Map(); // programs with pipelines and bind groups, until a buffer is replaced
    this.batch = new Uint32Array(4 * (1 + this.maxRows));
    this.ring = [];
    this.hostSeconds = 0; // spent in encoding and submitting
  }

  check() {
    if (this.failure) throw this.failure;
  }

  /** What a promise comes to, or the error by which the device ends. */
  orFailure(promise) {
    return new Promise((resolve, reject) => {
      const end = () => reject(this.failure);
      this.waiting.add(end);
      if (this.failure) end();
      const refused = (problem) => this.reason(problem).then(reject);
      promise.then(resolve, refused).finally(() => this.waiting.delete(end));
    });
  }

  /** Why something failed: the error by which the device ends, if it does. A browser may say that some time later. */
  async reason(problem) {
    const wait = problem instanceof ShaderlmError ? 50 : LOSS_IS_SAID;
    if (!this.failure) await Promise.race([this.failed, new Promise((done) => setTimeout(done, wait))]);
    return this.failure ?? problem;
  }

  // Pipelines

  hashesOf(programs) {
    return [...new Set(programs.flatMap((program) => program.dispatches.map(([hash]) => hash)))];
  }

  /** Compile what programs need, at once. `report` is told how many of their shaders are there, if any is not. */
  async compile(programs, report = () => {}) {
    const hashes = this.hashesOf(programs);
    let done = 0;
    const isThere = (hash) => this.pipelines.get(hash)?.pipeline !== undefined;
    if (!hashes.every(isThere)) {
      await Promise.all(hashes.map((hash) => this.pipeline(hash).then(() => report(++done, hashes.length))));
    }
  }

  /** Compile what a first question needs, then the rest, one by one. Resolves when the first part is there. */
  async compileFirst(report) {
    // It takes 30 to 100 tokens in a chat, most often without pictures.
    const far = (body) => Math.abs(Math.log2(body.rows) - 6) + body.keys / 1e4 + (body.images ? 99 : 0);
    const bodies = this.bodies.toSorted((a, b) => far(a) - far(b));
    const { heads } = this.variant;
    const plain = heads.filter((head) => head.kind !== "adjusted");
    await this.compile([this.bodies[0], ...plain, bodies[0]], report);
    this.#compileRest([...bodies, ...heads]).catch(() => {}); // whoever wants a pipeline is told
  }

  /** In the background, most wanted first. Where a CPU stands for the GPU, it would slow answers down: it waits for them. */
  async #compileRest(programs) {
    for (const hash of this.hashesOf(programs)) {
      for (let idle = null; idle !== this.idle; ) await (idle = this.idle);
      if (this.failure) return;
      await this.pipeline(hash);
    }
  }

  async pipeline(hash) {
    const known = this.pipelines.get(hash);
    if (known) return known;
    const made = this.#pipeline(hash);
    made.catch(() => {});
    this.pipelines.set(hash, made);
    const found = await made;
    this.pipelines.set(hash, found);
    return found;
  }

  async #pipeline(hash) {
    const { wgsl, bindings } = this.plan.shaders[hash];
    const access = bindings.join("");
    if (!this.layouts.has(access)) {
      const entries = bindings.map((kind, binding) => ({
        binding,
        visibility: COMPUTE,
        buffer: { type: ACCESS[kind] },
      }));
      const group = this.device.createBindGroupLayout({ entries });
      this.layouts.set(access, {
        access,
        group,
        layout: this.device.createPipelineLayout({ bindGroupLayouts: [group] }),
      });
    }
    const layout = this.layouts.get(access);
    this.device.pushErrorScope("validation"); // what is wrong with the text is said by the pipeline, too
    const module = this.device.createShaderModule({ code: wgsl });
    this.device.popErrorScope().catch(() => {});
    try {
      const pipeline = await this.device.createComputePipelineAsync({
        layout: layout.layout,
        compute: { module, entryPoint: "main" },
      });
      return { pipeline, layout };
    } catch (problem) {
      this.check();
      const said = `the GPU's driver cannot compile shader ${hash} of the variant ${this.variant.name}: ${problem.message}`;
      const error = new ShaderlmError("internal", `${said}. Load the model with { variant: "portable" }`, {
        cause: problem,
      });
      throw Object.assign(error, { variant: this.variant.name });
    }
  }

  // Buffers

  /** New buffers, all or none of them. */
  async allocate(sizes, what) {
    this.device.pushErrorScope("out-of-memory");
    let made = [];
    let problem = null;
    try {
      made = sizes.map((size) =>
        this.device.createBuffer({ size: rounded(size, 16), usage: STORAGE | UNIFORM | COPY_DST | COPY_SRC }),
      );
    } catch (error) {
      problem = error; // where no more address space is left
    }
    problem = (await this.orFailure(this.device.popErrorScope())) ?? problem;
    if (!problem) return made;
    for (const buffer of made) buffer.destroy();
    const needs = `${what} needs ${(sizes.reduce((sum, size) => sum + size, 0) / 1e6).toFixed(0)} MB`;
    throw outOfMemory(`${needs} of GPU memory, which this device does not have`, problem);
  }

  async allocateAll() {
    const { buffers } = this.variant;
    const words = buffers.map(([, role, content]) => (role === "params" ? content : null));
    let size = 0; // of all parameters: they share a buffer
    const offsets = words.map(
      (each) => each && (size = rounded(size, 256) + 4 * rounded(each.length, 4)) - 4 * rounded(each.length, 4),
    );
    const fixed = buffers.map(([, role], i) => i).filter((i) => !["params", "state", "table"].includes(buffers[i][1]));
    const made = await this.allocate([size, ...fixed.map((i) => buffers[i][2])], "the model");
    const params = new Uint8Array(rounded(size, 4));
    words.forEach((each, i) => {
      if (!each) return;
      new Uint32Array(params.buffer, offsets[i], each.length).set(each);
      this.buffers[i] = { buffer: made[0], offset: offsets[i], size: 4 * rounded(each.length, 4) };
    });
    this.queue.writeBuffer(made[0], 0, params);
    fixed.forEach((number, i) => (this.buffers[number] = { buffer: made[i + 1] }));
    const recurrent = fixed.filter((i) => buffers[i][1] === "recurrent");
    const copies = await this.allocate(
      recurrent.map((i) => buffers[i][2]),
      "a copy of the states",
    );
    recurrent.forEach((number, i) => this.snapshots.set(number, copies[i]));
    const pages = Math.ceil(Math.max(this.context, this.variant.first_pages * this.page) / this.page);
    // No spare rows, and the first row of the states, where there are some; then the pages.
    const before = [0xffffffff, 0].slice(0, this.tableFirst);
    this.write("page_table", Uint32Array.from([...before, ...Array(pages).keys()]));
    for (let i = 0; i <= STEPS_AHEAD; i++)
      this.ring.push(this.device.createBuffer({ size: 4 * STEPS_AT_ONCE, usage: MAP_READ | COPY_DST }));
    await this.reserve(1);
  }

  /** Where the weights of this variant lie in the stream of all weights: [offset, bytes, buffer]. */
  weights() {
    const found = this.variant.buffers.map(([name, role], i) =>
      role === "weight" ? [...this.plan.weights[name], this.buffers[i].buffer] : null,
    );
    return found.filter(Boolean);
  }

  buffer(name) {
    return this.buffers[this.numbers.get(name)]?.buffer;
  }

  write(name, words) {
    const buffer = this.buffer(name);
    if (buffer)
      this.queue.writeBuffer(buffer, 0, words, 0, Math.min(words.length, buffer.size / words.BYTES_PER_ELEMENT));
  }

  /** The states of recurrent layers into their copies, or back, after what was submitted. */
  copyStates(back) {
    const encoder = this.device.createCommandEncoder();
    for (const [number, copy] of this.snapshots) {
      const live = this.buffers[number].buffer;
      const [from, to] = back ? [copy, live] : [live, copy];
      encoder.copyBufferToBuffer(from, 0, to, 0, live.size);
    }
    this.queue.submit([encoder.finish()]);
  }

  /** Room for so many positions: keys, values and tables grow, what is in them stays. */
  async reserve(positions) {
    if (positions <= this.capacity) return;
    const most = rounded(Math.max(this.context, this.variant.first_pages * this.page), this.page);
    const wanted = Math.max(rounded(positions, this.page), 2 * this.capacity, this.variant.first_pages * this.page);
    const capacity = Math.min(most, wanted);
    const { buffers } = this.variant;
    const growing = buffers.map((_, i) => i).filter((i) => ["state", "table"].includes(buffers[i][1]));
    const made = await this.allocate(
      growing.map((i) => buffers[i][2] * capacity),
      `a conversation of ${capacity.toLocaleString("en")} tokens`,
    );
    const encoder = this.device.createCommandEncoder();
    growing.forEach((number, i) => {
      const [name, role] = buffers[number];
      const old = this.buffers[number]?.buffer;
      if (role === "table") this.queue.writeBuffer(made[i], 0, ropeTable(this.plan.tables[name], capacity));
      else if (old) encoder.copyBufferToBuffer(old, 0, made[i], 0, old.size);
    });
    this.queue.submit([encoder.finish()]);
    growing.forEach((number, i) => {
      this.buffers[number]?.buffer.destroy(); // after what was submitted
      this.buffers[number] = { buffer: made[i] };
    });
    this.groups.clear();
    this.bound.clear();
    this.capacity = capacity;
  }

  // Programs

  /** A program with everything that encoding it takes, so that a step allocates nothing per dispatch. */
  async bind(program) {
    const known = this.bound.get(program);
    if (known) return known;
    const shaders = await this.orFailure(Promise.all(program.dispatches.map(([hash]) => this.pipeline(hash))));
    const made = program.dispatches.map(([, x, y, z, ...numbers], i) => ({
      pipeline: shaders[i].pipeline,
      group: this.#group(shaders[i].layout, numbers),
      x,
      y,
      z,
    }));
    this.bound.set(program, made);
    return made;
  }

  #group({ access, group }, numbers) {
    const key = `${access} ${numbers}`;
    let found = this.groups.get(key);
    if (!found) {
      const entries = numbers.map((number, binding) => ({ binding, resource: this.buffers[number] }));
      this.groups.set(key, (found = this.device.createBindGroup({ layout: group, entries })));
    }
    return found;
  }

  /**
   * Submit bound programs, `times` over, and at most so many dispatches at a time. Returns a read-back of the tokens
   * that they sampled, if these are wanted.
   */
  submit(programs, wanted, { times = 1, most = Infinity } = {}) {
    const begin = performance.now();
    const buffer = wanted && this.ring.pop();
    let encoder = this.device.createCommandEncoder();
    for (let time = 0; time < times; time++) {
      encoder = this.#encode(encoder, programs, most);
      if (wanted) encoder.copyBufferToBuffer(this.buffer("tokens"), 0, buffer, 4 * time, 4);
    }
    this.queue.submit([encoder.finish()]);
    let pending = null;
    if (wanted) {
      const mapped = buffer.mapAsync(MAP_READ);
      mapped.catch(() => {}); // whoever waits for it is told
      pending = { buffer, mapped, count: times };
    }
    this.hostSeconds += (performance.now() - begin) / 1000;
    return pending;
  }

  /** Encode programs; where there are too many dispatches, submit a part of them. Returns the encoder to go on with. */
  #encode(encoder, programs, most) {
    let pass = encoder.beginComputePass();
    let pipeline = null;
    let group = null;
    let count = 0;
    for (const program of programs) {
      for (const step of program) {
        if (count++ === most) {
          pass.end();
          this.queue.submit([encoder.finish()]);
          encoder = this.device.createCommandEncoder();
          pass = encoder.beginComputePass();
          [pipeline, group, count] = [null, null, 1];
        }
        if (step.pipeline !== pipeline) pass.setPipeline((pipeline = step.pipeline));
        if (step.group !== group) pass.setBindGroup(0, (group = step.group));
        if (step.z > 1) pass.dispatchWorkgroups(step.x, step.y, step.z);
        else if (step.y > 1) pass.dispatchWorkgroups(step.x, step.y);
        else pass.dispatchWorkgroups(step.x); // in Node an argument takes a tenth of the call's time
      }
    }
    pass.end();
    return encoder;
  }

  /** The tokens of a read-back, whose buffer is free again. */
  async tokens({ buffer, mapped, count }) {
    await this.orFailure(mapped);
    const tokens = Array.from(new Uint32Array(buffer.getMappedRange(0, 4 * count)));
    buffer.unmap();
    this.ring.push(buffer);
    return tokens;
  }

  /** The program for the next rows of a prompt, and how many it takes. A row of an image takes one for several. */
  chunk(position, left, images) {
    const most = Math.min(left, this.maxRows);
    const rows = images ? images.whole(position, most) : most;
    const marked = Boolean(images?.marks(position, rows));
    const any = rows >= (this.variant.run_rows ?? Infinity);
    const fits = (body) =>
      body.rows >= (marked ? Math.max(rows, 2) : rows) &&
      (any || body.keys >= position + rows) &&
      Boolean(body.images) === marked;
    const body = this.bodies.find(fits);
    return body ? { body, rows } : { body: this.decodeBody(position), rows: 1 };
  }

  /** The programs that run a prompt from a position on, of which there are so many tokens, and the step after it. */
  programsFor(position, left, kind, images) {
    const bodies = [];
    const end = position + left;
    while (position < end) {
      const { body, rows } = this.chunk(position, end - position, images);
      if (body !== bodies.at(-1)) bodies.push(body);
      position += rows;
    }
    const heads = [this.head(bodies.at(-1).rows, kind), this.head(1, kind)];
    return [...bodies, ...heads, this.decodeBody(Math.min(end, this.context - 1), images?.shift)];
  }

  /** shift: of positions after images. */
  decodeBody(position, shift = 0) {
    return this.bodies.find((body) => body.rows === 1 && body.keys > position && Boolean(body.images) === (shift !== 0));
  }

  head(rows, kind) {
    return this.variant.heads.find((head) => head.kind === kind && (rows === 1) === (head.rows === 1));
  }

  /** The records of rows of the sequence, from a position on; `ids` null: of the token that was sampled last. */
  writeBatch(ids, position, rows, bucket, gives, images) {
    const [LAST, NONE, RUN] = [0x80000000, 0xffffffff, 0x80000000];
    const batch = this.batch.fill(0, 0, 4 * (1 + bucket));
    batch[0] = rows;
    batch[1] = gives ? 1 : 0;
    const run = images || rows >= (this.variant.run_rows ?? Infinity) ? RUN : 0;
    const pages = (this.tableFirst | run) >>> 0;
    for (let row = 0; row < bucket; row++) {
      const at = 4 * (row + 1);
      batch[at + 2] = NONE; // padding writes nothing
      if (row < rows) batch.set([ids ? ids[position + row] : LAST, position + row, position + row, pages], at);
    }
    this.queue.writeBuffer(this.buffer("batch"), 0, batch, 0, 4 * (1 + bucket));
  }

  close() {
    this.fail(new ShaderlmError("closed", "this model is closed; load it again"));
    this.device.destroy();
  }
}

/** (cos, sin) of every position and frequency, computed in double. */
function ropeTable({ formula, frequencies, magnitude }, positions) {
  if (formula !== "rope")
    throw new ShaderlmError(
      "damaged",
      `plan.json has the formula ${formula}, which this version does not know; export the model again`,
    );
  const table = new Float32Array(positions * frequencies.length * 2);
  for (let position = 0, at = 0; position < positions; position++) {
    for (const frequency of frequencies) {
      table[at++] = Math.cos(position * frequency) * magnitude;
      table[at++] = Math.sin(position * frequency) * magnitude;
    }
  }
  return table;
}

// A conversation --------------------------------------------------------------------------------------------

/** Runs the sequence of a runner: what is in its cache, prompts in chunks, and decode steps ahead of their tokens. */
class Sequence {
  constructor(runner) {
    this.runner = runner;
    this.ids = []; // whose keys and values are in the cache
    this.position = 0; // of the next row; rows that were submitted ahead may be of no use
    this.shift = 0; // of positions after the last image
    this.snapshot = 0; // tokens after which the copy of the states stands
    this.flight = []; // read-backs of tokens on their way
  }

  /** Run a prompt, as far as it is not in the cache. Its token is the first of `flight`. */
  async prompt(ids, sampler, signal, report, images) {
    const { runner } = this;
    const keys = images?.keys ?? ids;
    let position = 0;
    while (position < Math.min(ids.length - 1, this.ids.length) && keys[position] === this.ids[position]) position++;
    position = images?.begin(position) ?? position;
    if (runner.snapshots.size) position = this.begin(position);
    const cached = position;
    this.ids.length = this.position = position;
    this.shift = images?.shift ?? 0;
    sampler.write(runner, ids);
    await runner.reserve(ids.length);
    const programs = runner.programsFor(position, ids.length - position, sampler.kind, images);
    const compiled = runner.orFailure(
      runner.compile(programs, (done, total) => report({ stage: "compile", done, total })),
    );
    if (!(await abortedBefore(compiled, signal))) await compiled;
    const before = []; // chunks on their way
    while (position < ids.length && !signal?.aborted) {
      const { body, rows } = runner.chunk(position, ids.length - position, images);
      const last = position + rows === ids.length;
      const programs = [await runner.bind(body)];
      if (last) programs.push(await runner.bind(runner.head(body.rows, sampler.kind)));
      if (before.length === 2) await runner.orFailure(before.shift()); // an abort need not wait for more
      if (signal?.aborted) break;
      report({ stage: "prompt", done: position, total: ids.length });
      runner.writeBatch(ids, position, rows, body.rows, last, body.images);
      if (body.images) images.write(runner, position, rows);
      if (last) runner.write("outputs", sampler.record(rows - 1));
      const pending = runner.submit(programs, last, { most: DISPATCHES });
      if (pending) this.flight.push(pending);
      else before.push(runner.queue.onSubmittedWorkDone());
      this.ids.push(...keys.slice(position, position + rows));
      position += rows;
    }
    this.position = position;
    this.programs = null;
    if (runner.snapshots.size && position === ids.length) {
      runner.copyStates(false);
      this.snapshot = position;
    }
    return cached;
  }

  /** Where a prompt may begin of which so many tokens are in the cache: where the states stand, or their copy. */
  begin(common) {
    if (common === this.position && common === this.ids.length) return common;
    if (common < this.snapshot) this.snapshot = 0;
    if (this.snapshot) this.runner.copyStates(true);
    return this.snapshot;
  }

  /** Up to `most` decode steps, from the token that was sampled last. Waits for nothing but new memory and shaders. */
  async step(sampler, most) {
    const { runner, position } = this;
    if (!this.programs || position >= this.lastKey || position >= runner.capacity) {
      await runner.reserve(position + 1);
      const body = runner.decodeBody(position, this.shift);
      const programs = [await runner.bind(body), await runner.bind(runner.head(1, sampler.kind))];
      if (!this.programs) {
        runner.writeBatch(null, position, 1, 1, true);
        if (this.shift) runner.write("image_rows", new Int32Array(8).fill(this.shift, 0, 3));
        runner.write("outputs", sampler.record(0));
      }
      [this.programs, this.lastKey] = [programs, body.keys];
    }
    const times = Math.min(most, this.lastKey - position, runner.capacity - position);
    this.flight.push(runner.submit(this.programs, true, { times }));
    this.position += times;
    return times;
  }

  /** The tokens on their way are of no use any more; their buffers are. */
  async drain() {
    const flight = this.flight.splice(0);
    for (const pending of flight) await this.runner.tokens(pending).catch(() => {});
  }
}

/** How tokens are sampled, as the kernels read it. */
class Sampler {
  /** suppressed: tokens that never come. */
  constructor(options, suppressed = []) {
    this.options = options;
    const never = Object.fromEntries(suppressed.map((id) => [id, -Infinity]));
    this.bias = Object.entries({ ...options.logit_bias, ...never })
      .map(([id, bias]) => [Number(id), bias])
      .sort(([a], [b]) => a - b);
    this.penalizes =
      options.repetition_penalty !== 1 || options.presence_penalty !== 0 || options.frequency_penalty !== 0;
    this.kind = this.penalizes || this.bias.length ? "adjusted" : options.temperature === 0 ? "greedy" : "sample";
  }

  /** The record of an output: row, slot, temperature, top_k, top_p, min_p, seed. */
  record(row) {
    const { temperature, top_k, top_p, min_p, seed } = this.options;
    const words = new Uint32Array([row, 0, 0, top_k, 0, 0, Number(seed & 0xffffffffn), Number(seed >> 32n)]);
    new Float32Array(words.buffer).set([temperature], 2);
    new Float32Array(words.buffer).set([top_p, min_p], 4);
    return words;
  }

  /** What adjusted heads read: penalties, biases, no mask, no log probabilities, and how often each token came. */
  write(runner, ids) {
    if (this.kind !== "adjusted") return;
    const { repetition_penalty, presence_penalty, frequency_penalty } = this.options;
    const words = new Uint32Array([0, 0, 0, 0, this.bias.length, 0xffffffff, 0xffffffff, 0]);
    new Float32Array(words.buffer).set([repetition_penalty, presence_penalty, frequency_penalty]);
    runner.write("adjustments", words);
    const pairs = new Uint32Array(2 * this.bias.length);
    this.bias.forEach(([id, bias], i) => {
      pairs[2 * i] = id;
      new Float32Array(pairs.buffer)[2 * i + 1] = bias;
    });
    const most = (runner.buffer("biases")?.size ?? 0) / 8;
    if (this.bias.length > most) {
      const given = `logit_bias has ${this.bias.length} tokens`;
      throw new ShaderlmError("input", `${given}, this export takes ${most} at most`);
    }
    if (pairs.length) runner.write("biases", pairs);
    const counts = new Uint32Array(runner.plan.model.vocabulary);
    for (const id of ids) counts[id]++;
    runner.write("counts", counts);
  }
}

// Options ---------------------------------------------------------------------------------------------------

const isNumber = (least, most) => (value) => typeof value === "number" && value >= least && value <= most;
const isWhole = (least, most) => (value) => Number.isInteger(value) && value >= least && value <= most;
const isBoolean = (value) => typeof value === "boolean";
const SEEDS = [-(2n ** 63n), 2n ** 64n - 1n];

// Defaults, checks and what is expected, for the error: those of the Python engine.
const OPTIONS = {
  max_tokens: [256, isWhole(1, Infinity), "a whole number of at least 1"],
  stop: [
    [],
    (value) => Array.isArray(value) && value.every((each) => typeof each === "string"),
    "a string or a list of strings",
  ],
  ignore_eos: [false, isBoolean, "true or false"],
  parse_special: [null, isBoolean, "true or false"],
  temperature: [0, isNumber(0, 1e6), "0 (greedy) or a positive number, at most 1e6"],
  top_k: [0, isWhole(0, 2 ** 32 - 1), "a whole number of at least 0 (0: off)"],
  top_p: [1, isNumber(0, 1), "a number in 0 … 1 (1: off)"],
  min_p: [0, isNumber(0, 1), "a number in 0 … 1 (0: off)"],
  repetition_penalty: [1, isNumber(1e-3, 1e3), "a number in 0.001 … 1000 (1: off)"],
  presence_penalty: [0, isNumber(-100, 100), "a number in −100 … 100 (0: off)"],
  frequency_penalty: [0, isNumber(-100, 100), "a number in −100 … 100 (0: off)"],
  logit_bias: [{}, (value) => value && typeof value === "object", "an object from token ids to numbers"],
  seed: [
    null,
    (value) => typeof value === "bigint" && value >= SEEDS[0] && value <= SEEDS[1],
    "null or a whole number in −2^63 … 2^64 − 1 (a BigInt beyond 2^53)",
  ],
  signal: [null, (value) => typeof value.aborted === "boolean", "an AbortSignal"],
  onProgress: [null, (value) => typeof value === "function", "a function"],
  template_kwargs: [{}, (value) => value && typeof value === "object", "an object: variables of the chat template"],
};

function checked(given, vocabulary) {
  const unknown = Object.keys(given).find((name) => !Object.hasOwn(OPTIONS, name));
  if (unknown)
    throw new ShaderlmError("input", `unknown option ${unknown}. The options are ${Object.keys(OPTIONS).join(", ")}`);
  const options = {};
  for (const [name, [standard, right, expected]] of Object.entries(OPTIONS)) {
    let value = given[name] ?? standard;
    if (name === "stop" && typeof value === "string") value = [value];
    if (name === "seed" && Number.isSafeInteger(value)) value = BigInt(value);
    if (value !== null && !right(value))
      throw new ShaderlmError("input", `${name} must be ${expected}, got ${String(given[name])}`);
    options[name] = value;
  }
  for (const [id, bias] of Object.entries(options.logit_bias)) {
    const right = isWhole(0, vocabulary - 1)(Number(id)) && (bias === -Infinity || isNumber(-100, 100)(bias));
    if (!right) {
      const expected = `token ids of 0 … ${vocabulary - 1} and numbers in −100 … 100, or −Infinity`;
      throw new ShaderlmError("input", `logit_bias must have ${expected}; got ${id}: ${bias}`);
    }
  }
  options.stop = options.stop.filter((text) => text);
  options.seed = BigInt.asUintN(64, options.seed ?? crypto.getRandomValues(new BigUint64Array(1))[0]);
  return options;
}

// What users call -------------------------------------------------------------------------------------------

/** A model that is loaded. `load` makes it. One answer is generated at a time; other calls wait for their turn. */
class Model {
  #runner;
  #text;
  #sequence;
  #answer = null;
  #turn = Promise.resolve();
  #vision = null; // a promise of what reads pictures

  constructor(runner, text, info) {
    this.#runner = runner;
    this.#text = text;
    this.#sequence = new Sequence(runner);
    this.info = info;
  }

  /** Numbers and token ids of the answer that was generated last, or is being generated; null before the first. */
  get last() {
    return this.#answer?.report() ?? null;
  }

  /** Resolves with the error by which the model ends: its device is lost, or it is closed. */
  get lost() {
    return this.#runner.failed;
  }

  /** The answer to a conversation, in parts. */
  chat(messages, options) {
    const encode = ({ parse_special, template_kwargs }) =>
      this.#chatPrompt(messages, { parse_special: parse_special ?? false, template_kwargs });
    return this.#generate(options, encode, new Set(this.#text.about.shown_ids));
  }

  /** The continuation of a text, or of token ids, in parts. */
  complete(prompt, options) {
    const encode = (given) => ({ ids: this.tokenize(prompt, { parse_special: given.parse_special ?? true }) });
    return this.#generate(options, Array.isArray(prompt) ? () => ({ ids: prompt }) : encode);
  }

  /** The token ids of a text, as complete() makes them. */
  tokenize(text, { parse_special = true } = {}) {
    return this.#text.encode(text, { parseSpecial: parse_special });
  }

  /** The token ids of a conversation, as chat() makes them; of one with pictures, a promise of them. */
  tokenizeChat(messages, options) {
    const found = this.#chatPrompt(messages, options);
    return found.ids ?? found.then(({ ids, images }) => (images.forget(), ids));
  }

  /** Token ids of a conversation; of one with pictures, a promise of them and of what is known of their rows. */
  #chatPrompt(messages, { parse_special = false, template_kwargs = {} } = {}) {
    const hasParts = Array.isArray(messages) && messages.some((message) => Array.isArray(message?.content));
    if (this.info.vision && hasParts) return this.#promptWithPictures(messages, template_kwargs, parse_special);
    return { ids: this.#text.encodeChat(messages, template_kwargs, parse_special) };
  }

  async #promptWithPictures(messages, kwargs, parseSpecial) {
    const vision = await this.#sight();
    const { plain, pictures } = await vision.read(messages);
    const ids = this.#text.encodeChat(plain, kwargs, parseSpecial, (text) => vision.expanded(text, pictures));
    return { ids, images: vision.placed(ids, pictures) };
  }

  #sight() {
    const failed = ({ message }) => {
      this.#vision = null;
      throw new ShaderlmError("fetch", `cannot get vision.js, which reads pictures (${message}); check the connection`);
    };
    const refuse = (message) => new ShaderlmError("input", message);
    return (this.#vision ??= import("./vision.js").then(({ Vision }) => new Vision(this.#runner, refuse), failed));
  }

  /** The text of token ids, without special tokens. */
  detokenize(ids) {
    return this.#text.decode(checkIds(ids, this.#runner.plan.model.vocabulary));
  }

  /** Free all memory. An answer that is being generated ends with an error. */
  close() {
    this.#runner.close();
  }

  async *#generate(given, encode, shown) {
    const runner = this.#runner;
    const { vocabulary, context } = runner.plan.model;
    runner.check();
    const options = checked(given ?? {}, vocabulary);
    let ids, images;
    try {
      ({ ids, images } = await encode(options));
      checkIds(ids, vocabulary);
    } catch (problem) {
      throw explained(problem, "reading the prompt");
    }
    if (!images && ids.some((id) => runner.plan.vision?.placeholders.includes(id)))
      throw new ShaderlmError("input", "the prompt has tokens that stand for images, and no image; give images to chat()");
    if (!ids.length) throw new ShaderlmError("input", "the prompt is empty; give at least one word");
    if (ids.length > context) {
      const holds = `the prompt has ${ids.length.toLocaleString("en")} tokens, the context holds ${context}`;
      throw new ShaderlmError("input", `${holds}. Shorten the conversation`);
    }
    const stream = new TextStream(this.#text, options.stop, shown);
    const answer = new Answer(ids, options, stream, options.ignore_eos ? [] : this.#text.about.stop_ids);
    answer.left = Math.min(options.max_tokens, context - ids.length + 1);
    const release = await this.#takeTurn(options.signal);
    if (!release) return; // stopped while it waited
    this.#answer = answer;
    try {
      yield* this.#run(answer, images);
    } catch (problem) {
      throw explained(await runner.reason(problem), "generating");
    } finally {
      answer.finishReason ??= "abort";
      // Not awaited: whoever stops an answer need not wait for the steps that are on their way.
      this.#sequence.drain().then(release);
    }
  }

  /** Wait until no other answer is generated; null if the signal ends that. */
  async #takeTurn(signal) {
    const before = this.#turn;
    let release;
    this.#turn = this.#runner.idle = new Promise((resolve) => (release = resolve));
    if (await abortedBefore(before, signal)) {
      before.then(release);
      return null;
    }
    return release;
  }

  async *#run(answer, images) {
    const runner = this.#runner;
    const sequence = this.#sequence;
    const { signal } = answer.options;
    runner.hostSeconds = 0;
    const sampler = new Sampler(answer.options, runner.plan.model.suppressed);
    answer.begin();
    const report = telling(answer.options.onProgress);
    if (images && !(await (await this.#sight()).encode(images, signal, report))) return;
    answer.cachedTokens = await sequence.prompt(answer.prompt, sampler, signal, report, images);
    let submitted = 1;
    let atOnce = 1;
    while (sequence.flight.length) {
      while (sequence.flight.length < STEPS_AHEAD && submitted < answer.left) {
        submitted += await sequence.step(sampler, Math.min(atOnce, answer.left - submitted));
      }
      const pending = sequence.flight[0];
      if (await abortedBefore(pending.mapped, signal)) return;
      sequence.flight.shift();
      const since = answer.latest;
      for (const token of await runner.tokens(pending)) {
        // Its keys and values are there if a step after the one that gave it was submitted.
        if (sequence.ids.length < sequence.position) sequence.ids.push(token);
        const text = answer.push(token);
        answer.hostSeconds = runner.hostSeconds;
        if (text) yield text;
        if (answer.finishReason) return;
      }
      const each = (answer.latest - since) / pending.count; // milliseconds of a step; NaN for the first
      if (each < FRAME) atOnce = Math.min(STEPS_AT_ONCE, Math.max(1, Math.floor(FRAME / each)));
      else if (each >= FRAME) atOnce = 1;
    }
  }
}

/** Is a signal aborted before a promise is settled? */
async function abortedBefore(promise, signal) {
  if (!signal)
    return promise.then(
      () => false,
      () => false,
    );
  if (signal.aborted) return true;
  let listener;
  const abort = new Promise((resolve) =>
    signal.addEventListener("abort", (listener = () => resolve(true)), { once: true }),
  );
  try {
    return await Promise.race([
      promise.then(
        () => false,
        () => false,
      ),
      abort,
    ]);
  } finally {
    signal.removeEventListener("abort", listener);
  }
}

/** One generation: what was asked, what came, and how long it took. */
class Answer {
  constructor(prompt, options, stream, stopIds) {
    Object.assign(this, { prompt, options, stream, stopIds: new Set(stopIds) });
    this.ids = [];
    this.cachedTokens = 0;
    this.hostSeconds = 0;
    this.finishReason = null; // it is not over
  }

  begin() {
    this.started = performance.now();
  }

  /** One more token. The text that it makes certain; `finishReason` says whether it was the last. */
  push(token) {
    this.latest = performance.now();
    this.first ??= this.latest;
    if (this.stopIds.has(token)) {
      this.finishReason = "stop";
      return this.stream.finish();
    }
    this.ids.push(token);
    const text = this.stream.push(token);
    if (this.stream.stopped) this.finishReason = "stop";
    else if (this.ids.length >= this.left) this.finishReason = "length";
    return this.finishReason ? text + this.stream.finish() : text;
  }

  report() {
    const { prompt, ids, cachedTokens, finishReason, hostSeconds, started = 0, first = started, latest = first } = this;
    const decodeSeconds = (latest - first) / 1000;
    return {
      promptTokens: prompt.length,
      cachedTokens,
      completionTokens: ids.length,
      promptSeconds: (first - started) / 1000,
      decodeSeconds,
      tokensPerSecond: decodeSeconds > 0 ? Math.max(0, ids.length - 1) / decodeSeconds : 0,
      hostSeconds, // spent by this thread in encoding and submitting
      finishReason,
      ids,
    };
  }
}

function checkIds(ids, vocabulary) {
  if (!Array.isArray(ids) || !ids.every(isWhole(0, vocabulary - 1))) {
    throw new ShaderlmError("input", `token ids must be a list of whole numbers in 0 … ${vocabulary - 1}`);
  }
  return ids;
}

/** Calls onProgress, if there is one. What that throws is a mistake of the caller's, not of a file. */
const telling = (onProgress) => (event) => {
  try {
    onProgress?.(event);
  } catch (problem) {
    console.error("onProgress:", problem);
  }
};

/** Load the export in a folder. */
export async function load(url, options) {
  const { onProgress, signal, variant, cache = "auto", gpu } = options ?? {};
  const names = ["onProgress", "signal", "variant", "cache", "gpu"];
  const unknown = Object.keys(options ?? {}).find((name) => !names.includes(name));
  if (unknown) throw new ShaderlmError("input", `unknown option ${unknown}. The options are ${names.join(", ")}`);
  if (!["auto", "none"].includes(cache)) throw new ShaderlmError("input", `cache must be auto or none, got ${cache}`);
  const report = telling(onProgress);
  const failed = new Map(); // variants whose shaders the driver refuses, and why
  for (;;) {
    try {
      return await loadOnce(url, { report, signal, variant, cache, gpu, failed });
    } catch (problem) {
      if (problem.variant === undefined || variant !== undefined || failed.has(problem.variant)) throw problem;
      failed.set(problem.variant, problem.message);
    }
  }
}

async function loadOnce(url, { report, signal, variant, cache, gpu, failed }) {
  let runner = null;
  const abort = () => runner?.fail(aborted());
  signal?.addEventListener("abort", abort);
  try {
    if (signal?.aborted) throw aborted();
    report({ stage: "plan", done: 0, total: 1 });
    await requestAdapter(gpu); // says what is missing before anything is fetched
    const files = new Files(await folderOf(url), cache, signal);
    const plan = await files.plan();
    const opened = await openDevice(gpu, plan, variant, failed);
    runner = new Runner(opened.device, plan, opened.variant);
    if (signal?.aborted) throw aborted();
    files.warnings.push(...opened.warnings);
    await files.open();
    await files.list(plan.files);
    const compiled = runner.compileFirst((done, total) => report({ stage: "compile", done, total }));
    compiled.catch(() => {}); // awaited below, unless something else fails before
    const text = await loadText(files, plan);
    await runner.allocateAll();
    await loadWeights(files, plan, runner, report);
    await runner.orFailure(compiled);
    await files.forgetOld();
    runner.check();
    const { name, architecture, weight_bytes, parameters, context } = plan.model;
    const info = { name, architecture, parameters, context, weightBytes: weight_bytes };
    info.variant = opened.variant.name;
    info.device = deviceName(opened.adapter.info ?? {});
    info.chat = Boolean(text.template);
    info.vision = Boolean(plan.vision);
    info.cached = files.complete ? "cache" : "memory";
    info.warnings = files.warnings;
    report({ stage: "ready", done: 1, total: 1 });
    return new Model(runner, text, info);
  } catch (problem) {
    runner?.close();
    throw signal?.aborted ? aborted() : explained(problem, "loading");
  } finally {
    signal?.removeEventListener("abort", abort);
  }
}

/** Are all files of an export in the cache? Then load() fetches nothing large. */
export async function cached(url) {
  const files = new Files(await folderOf(url), "auto");
  const plan = await files.plan();
  await files.open();
  return files.has(plan.files);
}

const deviceName = ({ description, device, vendor, architecture }) =>
  [description || device, vendor, architecture].filter(Boolean).join(" ") || "unknown GPU";

async function loadText(files, plan) {
  if (!plan.text) return new Text({ stop_ids: [] }, null, null);
  const read = async (name) => {
    const file = plan.files.find((each) => each.name === name);
    if (!file) throw new ShaderlmError("damaged", `plan.json does not list ${name}; export the model again`);
    const { bytes, cached } = await files.read(file);
    if (!cached) await files.keep(file, bytes);
    return new TextDecoder().decode(bytes);
  };
  const tokenizer = JSON.parse(await read("tokenizer.json"));
  const { template } = plan.text;
  return new Text(plan.text, tokenizer, template === null ? null : JSON.parse(await read(template)));
}

/** Weights, file by file, into their buffers. Two files are in memory at most: one comes while one is being kept. */
async function loadWeights(files, plan, runner, onProgress) {
  const listed = plan.files.filter((file) => file.name.startsWith("weights-"));
  const weights = runner.weights();
  const total = listed.reduce((sum, file) => sum + file.bytes, 0);
  const staging = [0, 1].map(
    (i) => new Uint8Array(Math.max(0, ...listed.filter((_, j) => j % 2 === i).map((file) => file.bytes))),
  );
  const kept = [null, null];
  let done = 0;
  let warned = 0; // of the warnings, also of those from before: the tokenizer may not fit into the storage
  const report = (count) => {
    done += count;
    const message = files.warnings.slice(warned).join("; ");
    warned = files.warnings.length;
    onProgress({ stage: "weights", done, total, ...(message && { message }) });
  };
  let offset = 0;
  for (const [i, file] of listed.entries()) {
    await kept[i % 2];
    const { bytes, cached } = await files.read(file, report, staging[i % 2]);
    for (const [begin, size, buffer] of weights) {
      const from = Math.max(begin, offset);
      const end = Math.min(begin + rounded(size, 4), offset + bytes.length);
      if (from < end) runner.queue.writeBuffer(buffer, from - begin, bytes, from - offset, end - from);
    }
    offset += bytes.length;
    await runner.orFailure(runner.queue.onSubmittedWorkDone()); // what is written has left this process
    kept[i % 2] = cached ? null : files.keep(file, bytes);
  }
  await Promise.all(kept);
  report(0);
}
