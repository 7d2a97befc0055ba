// Settings of a conversation: the form, and what a request has of them. A field that is empty has the source's value.

import { byId } from "./dom.js";

// Of samplers that servers have, and browsers do not.
const SAMPLERS = [
  "dry_multiplier", "dry_base", "dry_allowed_length", "xtc_probability", "xtc_threshold", "typical_p", "top_n_sigma",
  "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
];
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "max_tokens",
  "seed", ...SAMPLERS,
];
const TEXTS = ["system", "stop", "schema"];

const field = (name) => byId("settings").elements[name];

/** Fields of a request. Where neither people nor the page say anything, the source's values for a chat are sent. */
export function requestFields(settings, defaults, hasSchemas = true) {
  const found = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens"]) {
    if (defaults?.[name] !== undefined) found[name] = defaults[name];
  }
  const numbers = NUMBERS.filter((name) => hasSchemas || !SAMPLERS.includes(name));
  for (const name of numbers) if (settings[name] !== undefined) found[name] = settings[name];
  const stop = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) found.stop = stop;
  if (settings.schema && hasSchemas) {
    const schema = JSON.parse(settings.schema);
    found.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  return found;
}

/** What is set, in few words. */
export function summary(settings, hasSchemas) {
  const words = [];
  if (settings.system) words.push("system prompt");
  if (settings.schema && hasSchemas) words.push("JSON schema");
  const numbers = NUMBERS.filter((name) => settings[name] !== undefined);
  for (const name of numbers) words.push(`${name.replaceAll("_", " ")} ${settings[name]}`);
  if (settings.stop) words.push("stop strings");
  return words.join(" · ");
}

/** The source's own values stand where nothing is given. */
export function showDefaults(defaults) {
  for (const name of NUMBERS) {
    const value = defaults[name];
    if (value !== undefined && value !== null) field(name).placeholder = String(value);
  }
}

function checkSchema() {
  const text = field("schema").value.trim();
  let problem = "";
  if (text) {
    try {
      const found = JSON.parse(text);
      if (found === null || typeof found !== "object" || Array.isArray(found)) problem = "A schema is an object: {…}";
    } catch (error) {
      problem = `This is not JSON: ${error.message}`;
    }
  }
  if (byId("schema-part").hidden) problem = ""; // nobody could mend it
  field("schema").setCustomValidity(problem);
  field("schema").setAttribute("aria-invalid", String(problem !== ""));
  byId("schema-problem").textContent = problem;
}

function read() {
  const found = {};
  for (const name of NUMBERS) if (field(name).value !== "") found[name] = field(name).valueAsNumber;
  for (const name of TEXTS) if (field(name).value.trim()) found[name] = field(name).value;
  return found;
}

/** Let people change settings. `apply` gets the new ones; Escape and Cancel change nothing. */
export function startSettings(apply, hasSchemas) {
  const form = byId("settings");
  byId("schema-part").hidden = byId("samplers-part").hidden = !hasSchemas;
  field("schema").addEventListener("input", checkSchema);
  byId("samplers-part").addEventListener("invalid", () => { byId("samplers-part").open = true; }, true); // to be seen
  form.addEventListener("submit", () => apply(read())); // method=dialog: only a form that is right is submitted
  byId("settings-reset").addEventListener("click", () => {
    for (const name of [...NUMBERS, ...TEXTS]) field(name).value = "";
    checkSchema();
    field("system").focus();
  });
}

export function openSettings(settings) {
  for (const name of [...NUMBERS, ...TEXTS]) field(name).value = settings[name] ?? "";
  checkSchema();
  byId("settings-dialog").showModal();
}
