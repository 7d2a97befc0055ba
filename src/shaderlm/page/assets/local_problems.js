// What can go wrong with a model that runs in this browser: a title for each code of the runtime, and what to do.

import { Problem, sentence } from "./problems.js";

const TITLES = {
  "insecure": "This address gives the page no WebGPU.",
  "no-webgpu": "This browser has no WebGPU.",
  "no-adapter": "The browser finds no GPU that it may use.",
  "no-variant": "This GPU cannot run this model.",
  "out-of-memory": "There is too little memory for this model.",
  "device-lost": "The GPU was lost.",
  "fetch": "A file could not be fetched.",
  "damaged": "A file of the model is damaged.",
  "input": "The model cannot take this.",
  "closed": "The model is not loaded.",
  "worker": "The page's own worker failed.",
};

// Where the page knows better what to do than the runtime's message.
const ADVICE = {
  "insecure": () => `Browsers give WebGPU to https:// and to this machine itself, not to ${location.origin}. `
    + "Open the page over HTTPS: shaderlm serve takes --ssl-cert-file and --ssl-key-file.",
  "no-webgpu": () => "Chrome and Edge have it since version 113, Safari since 26, Firefox since 141. "
    + "On Linux some have it behind a setting.",
  "no-adapter": () => "Turn on hardware acceleration in the browser's settings, update the driver of the GPU, "
    + "or try another browser.",
  "device-lost": () => "Its driver was reset, or something else took it. Reload the model. "
    + "If it happens again, close other programs or use a smaller model.",
  "closed": () => "Load it, then try again.",
  "worker": (said) => `Reload the page. If that does not help, export the model again. ${said}`,
};

/** The problem of a ShaderlmError: its code and its message. */
export function localProblem(code, message = "") {
  const said = message && sentence(message);
  return new Problem(code, TITLES[code] ?? "The model failed.", (ADVICE[code]?.(said) ?? said).trim());
}
