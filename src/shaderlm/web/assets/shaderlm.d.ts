// Types of shaderlm.js: models that `shaderlm export-web` wrote, run with WebGPU in pages, workers and Node.

/** Load the export in a folder: its address, or in Node also its path. */
export function load(url: string | URL, options?: LoadOptions): Promise<Model>;

/** Are all files of an export in this browser's cache? Then load() fetches nothing large. */
export function cached(url: string | URL): Promise<boolean>;

export interface LoadOptions {
  onProgress?: (progress: Progress) => void;
  /** Aborting it ends loading with a ShaderlmError "aborted". It has no effect on a model that is loaded. */
  signal?: AbortSignal;
  /** The name of a variant of the export, in place of the best one that the GPU can run. */
  variant?: string;
  /** "auto" (default): files are kept for the next visit, in the Cache API. "none": they are not. */
  cache?: "auto" | "none";
  /** A GPU object; default: navigator.gpu. In Node, what create([]) of the npm package webgpu returns; it is not freed again. */
  gpu?: unknown;
}

export interface Progress {
  /** Of load(): the first four. Of an answer, before its first token: "compile", where shaders are missing, "pictures" and "prompt". */
  stage: "plan" | "weights" | "compile" | "ready" | "pictures" | "prompt";
  /** Of "weights": bytes. Of "compile": shaders. Of "pictures": new ones. Of "prompt": tokens. */
  done: number;
  total: number;
  /** A sentence for people, such as that the browser's storage is full. */
  message?: string;
}

/** A model that is loaded. One answer is generated at a time: a second call waits until the first one has ended. */
export interface Model {
  readonly info: ModelInfo;
  /** Of the answer that was generated last, or is being generated; null before the first. */
  readonly last: AnswerInfo | null;
  /** Resolves with the error by which the model ends: its device is lost, or it is closed. */
  readonly lost: Promise<ShaderlmError>;
  /** The answer to a conversation, in pieces of text. Leave the loop, or abort the signal, to stop it. */
  chat(messages: Message[], options?: GenerationOptions): AsyncGenerator<string, void, undefined>;
  /** The continuation of a text, or of token ids, in pieces of text. */
  complete(prompt: string | number[], options?: GenerationOptions): AsyncGenerator<string, void, undefined>;
  /** The token ids of a text, as complete() makes them. */
  tokenize(text: string, options?: { parse_special?: boolean }): number[];
  /** The token ids of a conversation, as chat() makes them; of one with parts, where the model sees, a promise of them. */
  tokenizeChat(messages: TextMessage[], options?: TokenizeOptions): number[];
  tokenizeChat(messages: Message[], options?: TokenizeOptions): number[] | Promise<number[]>;
  /** The text of token ids, without special tokens. */
  detokenize(ids: number[]): string;
  /** Free all memory. An answer that is being generated ends with a ShaderlmError "closed". */
  close(): void;
}

export interface TokenizeOptions {
  parse_special?: boolean;
  template_kwargs?: Record<string, unknown>;
}

export interface Message {
  role: "system" | "user" | "assistant" | "tool";
  /** Parts only for a model that sees: `info.vision`. */
  content: string | ContentPart[];
  [name: string]: unknown;
}

export interface TextMessage extends Message {
  content: string;
}

export type ContentPart =
  | { type: "text"; text: string }
  | { type: "image"; image: ImageSource }
  | { type: "image_url"; image_url: string | { url: string } };

/** A string is an address: of the page's own origin, blob: or data:. `data` is RGBA. In Node only that is read. */
export type ImageSource = Blob | ImageBitmap | { width: number; height: number; data: Uint8Array | Uint8ClampedArray } | string | URL;

/** Defaults are those of the Python engine: greedy, 256 tokens. */
export interface GenerationOptions {
  /** Tokens to generate at most (default: 256). */
  max_tokens?: number;
  /** 0 (default): greedy, the most likely token. Larger values sample more evenly. */
  temperature?: number;
  /** Sample from the k most likely tokens (default: 0, all). */
  top_k?: number;
  /** Sample from the most likely tokens whose probabilities add up to p (default: 1, all). */
  top_p?: number;
  /** Sample from tokens with at least this fraction of the largest probability (default: 0, all). */
  min_p?: number;
  /** The same seed gives the same text on the same device (default: another one each time). */
  seed?: number | bigint | null;
  /** Strings that end the answer. No part of them is shown. */
  stop?: string | string[];
  /** Go on after the model's end-of-turn token (default: false). */
  ignore_eos?: boolean;
  /** Read the text of a special token, such as <|im_end|>, as that token (default: true; of messages in a chat: false). */
  parse_special?: boolean;
  /** Divide positive logits of tokens seen before by it, multiply negative ones with it (default: 1, off). */
  repetition_penalty?: number;
  /** Subtract it once from the logit of a token seen before (default: 0). */
  presence_penalty?: number;
  /** Subtract it from a token's logit each time that the token was seen (default: 0). */
  frequency_penalty?: number;
  /** Token id → number that is added to its logit; -Infinity excludes the token. */
  logit_bias?: Record<number, number>;
  /** Aborting it ends the answer; `last.finishReason` is "abort". */
  signal?: AbortSignal;
  /** Variables for the chat template, such as { enable_thinking: false }. */
  template_kwargs?: Record<string, unknown>;
  /** What happens before the first token. */
  onProgress?: (progress: Progress) => void;
}

export interface ModelInfo {
  name: string;
  architecture: string;
  parameters: number;
  /** Tokens of a conversation at most. */
  context: number;
  weightBytes: number;
  /** Which plans of the export run. */
  variant: string;
  /** The GPU, as far as the browser says. */
  device: string;
  /** Does it have a chat template? */
  chat: boolean;
  /** Does it read pictures? */
  vision: boolean;
  /** "cache": the next visit fetches no weights. */
  cached: "cache" | "memory";
  /** Sentences for people. */
  warnings: string[];
}

export interface AnswerInfo {
  promptTokens: number;
  /** Of the prompt, not computed: the same as in the conversation before. */
  cachedTokens: number;
  completionTokens: number;
  /** Until the first token, and from there to the last. */
  promptSeconds: number;
  decodeSeconds: number;
  tokensPerSecond: number;
  /** Spent by the calling thread in encoding and submitting. */
  hostSeconds: number;
  /** "stop": the model ended its turn, or a stop string came. "length": max_tokens, or the context is full. null: it goes on. */
  finishReason: "stop" | "length" | "abort" | null;
  ids: number[];
}

export type ErrorCode =
  | "no-webgpu"
  | "insecure"
  | "no-adapter"
  | "no-variant"
  | "out-of-memory"
  | "device-lost"
  | "fetch"
  | "damaged"
  | "aborted"
  | "input"
  | "closed"
  | "internal";

/** Every error of this module. `message` says what was found and what to do. */
export class ShaderlmError extends Error {
  constructor(code: ErrorCode, message: string, options?: { cause?: unknown });
  readonly name: "ShaderlmError";
  readonly code: ErrorCode;
}
