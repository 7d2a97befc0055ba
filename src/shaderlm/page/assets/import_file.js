// Reads conversations from a JSON file that people chose, whoever wrote it. What is wrong is said in words, and then
// nothing of it is taken. Knows no page: `checkSettings` knows the limits of settings.

import { FORMAT, VERSION } from "./export_file.js";
import { MOST_PICTURES } from "./pictures.js";
import { TITLE_LENGTH } from "./texts.js";

const MOST_BYTES = 16e6; // browsers give a page 5 to 10 MB
const MOST_CONVERSATIONS = 5000;
const MOST_MESSAGES = 20000; // of one conversation
const PICTURE = /^data:image\/(jpeg|png|webp|gif);base64,[A-Za-z0-9+/]+=*$/;
const SHORT = 1000; // characters of a model's name, of a problem

export class ImportError extends Error {}

const fail = (text) => { throw new ImportError(text); };

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** What a value is, for a message. */
function kindOf(value) {
  if (value === undefined) return "nothing";
  if (value === null) return "null";
  if (Array.isArray(value)) return "a list";
  if (isObject(value)) return "an object";
  return `${typeof value === "string" ? "the text " : ""}${JSON.stringify(value).slice(0, 40)}`;
}

const expect = (isRight, where, what, value) => {
  if (!isRight) fail(`${where} must be ${what}, and it is ${kindOf(value)}.`);
};

function checkText(value, where, most = Infinity) {
  expect(typeof value === "string", where, "a text", value);
  if (value.length > most) fail(`${where} has ${value.length} characters, and ${most} is the most.`);
  return value;
}

function checkCount({ length }, most, where, what) {
  if (length > most) fail(`${where} has ${length} ${what}, and ${most} is the most.`);
}

function checkNumber(value, where) {
  expect(Number.isFinite(value) && value >= 0, where, "a number of at least 0", value);
  return value;
}

/** The fields of an object that are there and known: {name: check(value, where)}. Others are left out. */
function fields(given, where, checks) {
  const found = {};
  for (const [name, check] of Object.entries(checks)) {
    if (Object.hasOwn(given, name) && given[name] !== null) found[name] = check(given[name], `${where}: ${name}`);
  }
  return found;
}

const FIGURES = Object.fromEntries(
  ["firstToken", "rate", "tokens", "used", "context"].map((name) => [name, checkNumber]),
);

const short = (value, where) => checkText(value, where, SHORT);

const object = (checks) => (value, where) => {
  expect(isObject(value), where, "an object", value);
  return fields(value, where, checks);
};

function checkProblem(value, where) {
  return { kind: "", title: "", advice: "", ...object({ kind: short, title: short, advice: short })(value, where) };
}

const ANSWER = {
  thoughts: checkText, model: short, ended: short, isJson: (value) => value === true, figures: object(FIGURES),
  problem: checkProblem, leftOut: checkNumber,
};

/** Pictures of a message: nothing that would be fetched from elsewhere. */
function checkImages(value, where) {
  expect(Array.isArray(value), where, "a list", value);
  checkCount(value, MOST_PICTURES, where, "pictures");
  value.forEach((url) => expect(typeof url === "string" && PICTURE.test(url), where, "a list of pictures as data URLs", url));
  return value;
}

function checkMessage(message, where, at) {
  expect(isObject(message), where, "an object", message);
  const { role } = message;
  expect(role === "user" || role === "assistant", `${where}: role`, "user or assistant", role);
  const content = checkText(message.content, `${where}: content`);
  if (role === "user") return { role, content, ...fields(message, where, { images: checkImages }) };
  const first = (value, what) => {
    expect(Number.isInteger(value) && value >= 0 && value <= at, what, "the number of an earlier message", value);
    return value;
  };
  return { role, content, figures: {}, ...fields(message, where, { ...ANSWER, first }) };
}

/** A list of messages may begin with a system prompt, as OpenAI's do. */
function checkConversation(given, where, checkSettings) {
  expect(isObject(given), where, "an object", given);
  expect(Array.isArray(given.messages), `${where}: messages`, "a list", given.messages);
  const settings = given.settings ?? {};
  expect(isObject(settings), `${where}: settings`, "an object", settings);
  const [first] = given.messages;
  const isSystem = isObject(first) && first.role === "system";
  const prompt = isSystem ? { system: checkText(first.content, `${where}, message 1: content`) } : {};
  const messages = isSystem ? given.messages.slice(1) : given.messages;
  if (!messages.length) fail(`${where} has no messages.`);
  checkCount(messages, MOST_MESSAGES, where, "messages");
  const title = (value, what) => checkText(value, what, TITLE_LENGTH).trim();
  const number = (i) => `${where}, message ${i + 1 + isSystem}`;
  return {
    id: typeof given.id === "string" && /^[0-9a-z]{1,32}$/.test(given.id) ? given.id : null,
    updated: Number.isFinite(given.updated) ? Math.min(given.updated, Date.now()) : Date.now(),
    ...fields(given, where, { title }),
    settings: checkSettings({ ...prompt, ...settings }, (name, text) => fail(`${where}: ${name}: ${text}`)),
    messages: messages.map((message, i) => checkMessage(message, number(i), i)),
  };
}

function conversationsOf(file) {
  const isMessage = (each) => isObject(each) && "role" in each;
  if (Array.isArray(file)) return file.length && file.every(isMessage) ? [{ messages: file }] : file;
  if (!isObject(file)) fail(`The file must have conversations, and it is ${kindOf(file)}.`);
  const isNewer = file.format === FORMAT && file.version > VERSION;
  if (isNewer) fail("A newer version of this page wrote the file. Import it there.");
  if (Array.isArray(file.messages)) return [file];
  const isOurs = Array.isArray(file.conversations);
  if (!isOurs) fail("The file has no conversations. Choose one that this page exported as JSON.");
  return file.conversations;
}

/** The conversations of a file's text. An id may be null. */
export function fromJson(text, checkSettings) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (problem) {
    fail(`The file is not JSON: ${problem.message.slice(0, 200)}`);
  }
  const given = conversationsOf(file);
  if (!given.length) fail("The file has no conversations.");
  checkCount(given, MOST_CONVERSATIONS, "The file", "conversations");
  return given.map((each, i) => checkConversation(each, `Conversation ${i + 1}`, checkSettings));
}

/** The text of a file. One that is too large is not even read. */
export async function textOf(file) {
  const [size, most] = [Math.ceil(file.size / 1e6), MOST_BYTES / 1e6];
  if (file.size > MOST_BYTES) fail(`The file has ${size} MB, and ${most} MB is the most.`);
  let bytes;
  try {
    bytes = await file.arrayBuffer();
  } catch {
    fail("The file cannot be read. Is it still there?");
  }
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return fail("The file is not text in UTF-8.");
  }
}
