// Settings of a conversation: the form, and what a request has of them. A field that is empty has the source's value.

import { byId } from "./dom.js";
import { checkedSettings, field, samplerNames, textProblem } from "./settings_check.js";

// Of samplers that servers have, and browsers do not.
const SAMPLERS = [
  "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_probability", "xtc_threshold",
  "typical_p", "top_n_sigma", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta",
];
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "max_tokens",
  "seed", ...SAMPLERS,
];
const TEXTS = ["system", "stop", "schema", "dry_sequence_breakers", "samplers"];

const lines = (text = "") => text.split("\n").filter((line) => line !== "");

/** Fields of a request. Where neither people nor the page say anything, the source's values for a chat are sent. */
export function requestFields(settings, defaults, hasSchemas = true) {
  const found = {};
  for (const name of ["temperature", "top_p", "top_k", "min_p", "max_tokens"]) {
    if (defaults?.[name] !== undefined) found[name] = defaults[name];
  }
  const numbers = NUMBERS.filter((name) => hasSchemas || !SAMPLERS.includes(name));
  for (const name of numbers) if (settings[name] !== undefined) found[name] = settings[name];
  const stop = lines(settings.stop);
  if (stop.length) found.stop = stop;
  if (!hasSchemas) return found;
  const breakers = lines(settings.dry_sequence_breakers).map((each) => each.replaceAll("\\n", "\n"));
  if (breakers.length) found.dry_sequence_breakers = breakers;
  if (settings.samplers) found.samplers = samplerNames(settings.samplers);
  if (settings.schema) {
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
  if (settings.samplers && hasSchemas) words.push("order of samplers");
  if (settings.stop) words.push("stop strings");
  return words.join(" · ");
}

/** The source's own values stand where nothing is given. */
export function showDefaults(defaults) {
  const { samplers, dry_sequence_breakers: breakers } = defaults;
  const texts = {
    samplers: samplers?.join(" "), dry_sequence_breakers: breakers?.map((each) => each.replaceAll("\n", "\\n")).join("\n"),
  };
  for (const [name, value] of Object.entries({ ...defaults, ...texts })) {
    const isShown = NUMBERS.includes(name) || name in texts;
    if (isShown && value !== undefined && value !== null) field(name).placeholder = String(value);
  }
}

function checkSchema() {
  const text = field("schema").value;
  const problem = byId("schema-part").hidden ? "" : textProblem("schema", text); // nobody could mend it
  field("schema").setCustomValidity(problem);
  field("schema").setAttribute("aria-invalid", String(problem !== ""));
  byId("schema-problem").textContent = problem;
}

function checkOrder() {
  const isHidden = byId("samplers-part").hidden;
  field("samplers").setCustomValidity(isHidden ? "" : textProblem("samplers", field("samplers").value));
}

function read() {
  const found = {};
  for (const name of NUMBERS) if (field(name).value !== "") found[name] = field(name).valueAsNumber;
  for (const name of TEXTS) if (field(name).value.trim()) found[name] = field(name).value;
  return found;
}

/** Settings of a file, within the limits of the form. */
export const settingsOfFile = (given, fail) => checkedSettings(given, NUMBERS, [...TEXTS, "model"], fail);

function write(settings) {
  for (const name of [...NUMBERS, ...TEXTS]) field(name).value = settings[name] ?? "";
  checkSchema();
  checkOrder();
}

/** Let people change settings. `apply` gets the new ones; Escape and Cancel change nothing. */
export function startSettings(apply, hasSchemas) {
  const form = byId("settings");
  byId("schema-part").hidden = byId("samplers-part").hidden = !hasSchemas;
  field("schema").addEventListener("input", checkSchema);
  field("samplers").addEventListener("input", checkOrder);
  byId("samplers-part").addEventListener("invalid", () => { byId("samplers-part").open = true; }, true); // to be seen
  form.addEventListener("submit", () => apply(read())); // method=dialog: only a form that is right is submitted
  byId("settings-reset").addEventListener("click", () => {
    write({});
    field("system").focus();
  });
}

export function openSettings(settings) {
  write(settings);
  byId("settings-dialog").showModal();
}
