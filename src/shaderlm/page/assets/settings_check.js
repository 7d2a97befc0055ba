// What settings must be: the limits of the form, for people and for files. Knows no dialog.

import { byId } from "./dom.js";

/** Samplers by the names that `samplers` takes. */
const ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

export const field = (name) => byId("settings").elements[name];

/** Names of samplers in their order, from a text. */
export const samplerNames = (text) => text.split(/[\s,;]+/).filter(Boolean);

function schemaProblem(text) {
  try {
    const found = JSON.parse(text);
    return found === null || typeof found !== "object" || Array.isArray(found) ? "A schema is an object: {…}" : "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

function orderProblem(text) {
  const names = samplerNames(text);
  const wrong = names.find((name, i) => !ORDER.includes(name) || names.indexOf(name) !== i);
  if (wrong === undefined) return "";
  const why = ORDER.includes(wrong) ? `${wrong} is there twice.` : `There is no sampler ${wrong.slice(0, 40)}.`;
  return `${why} Give some of ${ORDER.join(", ")}, each once.`;
}

const PROBLEMS = { schema: schemaProblem, samplers: orderProblem };

/** What is wrong with a text of settings; "": nothing. */
export const textProblem = (name, text) => (text.trim() && PROBLEMS[name]?.(text)) || "";

function numberProblem(name, value) {
  const { min, max, step } = field(name);
  const isWhole = step === "any" || (value - Number(min)) % Number(step) === 0;
  if (typeof value === "number" && value >= Number(min) && value <= Number(max) && isWhole) return "";
  const kind = step === "1" ? "a whole number" : "a number";
  return `it must be ${kind} in ${min} … ${max}${step === "2" ? " in steps of 2" : ""}.`;
}

/** Settings of a file: those that are known. `fail(name, text)` says what is wrong, and does not return. */
export function checkedSettings(given, numbers, texts, fail) {
  const found = {};
  for (const name of [...numbers, ...texts]) {
    const value = given[name];
    if (value === undefined || value === null || value === "") continue;
    const isText = texts.includes(name);
    const wrong = isText && typeof value !== "string" ? "it must be a text." : "";
    const problem = wrong || (isText ? textProblem(name, value) : numberProblem(name, value));
    if (problem) fail(name, problem);
    found[name] = value;
  }
  return found;
}
