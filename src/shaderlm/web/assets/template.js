// Makes functions of chat templates that web/template.py has compiled, with values and operators of Python.
// Names of a template are keys of maps, never of JavaScript's objects. What it computes costs steps, which are limited.

const STEPS = 3_000_000; // of a rendering: parts of the tree, items of lists
const CHARACTERS = 16; // that are copied or read in a step
const MOST_TEXT = 4_000_000; // characters of a text
const MOST_CALLS = 150; // of macros, within each other
const MOST_RANGE = 100_000; // as in Jinja's sandbox
const LONGEST_PROBLEM = 300; // characters of a template's own words

/** A template fails, or refuses a conversation. */
export class TemplateError extends Error {
  constructor(message, refuses = false) {
    super(message);
    this.refuses = refuses;
  }
}

const fail = (message) => {
  throw new TemplateError(message);
};
const wrong = (expected, value) =>
  fail(value instanceof Undefined ? value.message : `${expected}, got ${kindOf(value)}`);

// Costs -----------------------------------------------------------------------------------------------------

let steps = 0; // that remain
let calls = 0; // of macros, now
let output = ""; // so far
let captured = ""; // the text of a block, for its filter
let variables = new Map(); // of the caller

function spend(count) {
  steps -= count;
  if (!(steps >= 0)) fail(`takes more than ${STEPS} steps, which is the most`);
}

/** Before a text of so many characters is made. */
function room(length) {
  if (!(length <= MOST_TEXT)) fail(`makes a text of more than ${MOST_TEXT} characters, which is the most`);
  spend(length / CHARACTERS);
}

/** Before a text is looked for. */
const search = (text, part) => spend((text.length * (part.length + 64)) / 1024);

// Values ----------------------------------------------------------------------------------------------------
// None is null, an int is a number, a list is an array, a dict is a Map, and an undefined variable an Undefined.

class Tuple extends Array {}
class Float {
  constructor(value) {
    this.value = value;
  }
}
class Undefined {
  constructor(message) {
    this.message = message;
  }
}
class Namespace {
  constructor(entries) {
    this.entries = entries;
  }
}
/** A function: (arguments, Map of named ones) => value. */
class Callable {
  constructor(call) {
    this.call = call;
  }
}
/** What `safe` gives: it escapes what is added to it. */
class Safe {
  constructor(text) {
    this.text = text;
  }
}
/** What range(), keys(), values() and items() give. */
class View {
  constructor(kind, items) {
    this.kind = kind;
    this.items = items;
  }
}
/** Items that are computed when they are taken, once. */
class Lazy {
  constructor(iterator) {
    this.iterator = iterator;
  }
  [Symbol.iterator]() {
    return { next: () => this.iterator.next() }; // without `return`: a loop that ends early leaves the rest
  }
}

const isText = (value) => typeof value === "string";
const isInteger = (value) => typeof value === "number";
const isBool = (value) => typeof value === "boolean";
const isNumber = (value) => isInteger(value) || isBool(value) || value instanceof Float;
const isSequence = (value) => isText(value) || Array.isArray(value);

/** Python's name of a type, for messages. */
function kindOf(value) {
  if (value === null) return "None";
  if (typeof value !== "object") return { string: "str", number: "int", boolean: "bool" }[typeof value];
  return { Array: "list", Map: "dict" }[value.constructor.name] ?? value.constructor.name.toLowerCase();
}

/** A value of JavaScript as one of templates. What JSON does not have is refused. */
function imported(value, depth = 0) {
  spend(1);
  if (depth > 200) fail("a variable is nested too deeply, or holds itself");
  if (isText(value)) spend(value.length / CHARACTERS);
  if (value === null || isBool(value) || isText(value)) return value;
  if (isInteger(value)) return Number.isInteger(value) ? value : new Float(value);
  if (Array.isArray(value)) return value.map((each) => imported(each ?? null, depth + 1));
  if (typeof value !== "object") fail(`a variable has a value of the type ${typeof value}, which JSON does not have`);
  const entries = Object.entries(value).filter(([, each]) => each !== undefined);
  return new Map(entries.map(([key, each]) => [key, imported(each, depth + 1)]));
}

/** What can be counted in a value. */
function partsOf(value) {
  if (isSequence(value)) return value;
  if (value instanceof Map) return spend(value.size / CHARACTERS), [...value.keys()];
  return value instanceof Undefined ? [] : value?.items;
}

function isTrue(value) {
  if (value instanceof Safe) return value.text !== "";
  if (isNumber(value)) return numberOf(value) !== 0;
  return value !== null && partsOf(value)?.length !== 0;
}

function each(value) {
  if (value instanceof Lazy || value instanceof Loop) return value;
  return isText(value) ? characters(value) : (partsOf(value) ?? wrong("items are expected", value));
}

function list(value) {
  const items = [];
  for (const item of each(value)) {
    spend(1);
    items.push(item);
  }
  return items;
}

function lengthOf(value) {
  if (value instanceof Safe) return textLength(value.text);
  if (value instanceof Loop) return value.count();
  if (isText(value)) return textLength(value);
  return (partsOf(value) ?? wrong("a value with a length is expected", value)).length;
}

const numberOf = (value) => (value instanceof Float ? value.value : isNumber(value) ? Number(value) : undefined);
const integer = (value) =>
  isInteger(value) || isBool(value) ? Number(value) : wrong("a whole number is expected", value);
const whole = (value) => (Number.isSafeInteger(value) ? value + 0 : fail("a whole number has more than 53 bits"));
const wordOf = (value) => (isText(value) ? value : wrong("a text is expected", value));

function keyOf(value) {
  if (Array.isArray(value) ? !(value instanceof Tuple) : value instanceof Map) wrong("a key is expected", value);
  const number = numberOf(value);
  return number === undefined ? value : number;
}

function mapping(pairs) {
  const made = new Map();
  for (const [key, value] of pairs) {
    if (!(isText(key) || isInteger(key) || key === null)) wrong("a key is a text, a whole number or None here", key);
    made.set(key, value);
  }
  return made;
}

// Texts -----------------------------------------------------------------------------------------------------
// Python counts characters where JavaScript counts halves of those past U+FFFF.

const SPACES = "\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000";
const SPACE = new RegExp(`[${SPACES}]`);
const isWide = (text) => /[\ud800-\udfff]/.test(text);

function characters(text) {
  spend(text.length);
  return isWide(text) ? Array.from(text) : text.split("");
}

function textLength(text) {
  spend(text.length / CHARACTERS);
  return isWide(text) ? characters(text).length : text.length;
}

function concat(parts, between = "") {
  room(parts.reduce((sum, part) => sum + part.length, between.length * parts.length));
  return parts.join(between);
}

function quoted(text) {
  room(text.length);
  const quote = text.includes("'") && !text.includes('"') ? '"' : "'";
  const body = text.replace(/[\\'"\x00-\x1f\x7f-\xa0\xad]|[^\x00-\xff]/gu, (found) => {
    const escape = { "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", [quote]: `\\${quote}` }[found];
    const code = found.codePointAt(0);
    const isPlain = found === "'" || found === '"' || (code > 255 && !/[\p{C}\p{Z}]/u.test(found));
    if (escape || isPlain) return escape ?? found;
    const [letter, digits] = code < 256 ? ["x", 2] : code < 65536 ? ["u", 4] : ["U", 8];
    return `\\${letter}${code.toString(16).padStart(digits, "0")}`;
  });
  return quote + body + quote;
}

function floatText(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value < 0 ? "-inf" : "inf";
  const [mantissa, power] = value.toExponential().split("e");
  if (power < -4 || power > 15) return `${mantissa}e${power[0]}${power.slice(1).padStart(2, "0")}`;
  const text = Object.is(value, -0) ? "-0" : String(value);
  return text.includes(".") ? text : `${text}.0`;
}

/** repr() of Python. */
function shown(value) {
  spend(1);
  const items = (values) => concat(Array.from(values, shown), ", ");
  if (isText(value)) return quoted(value);
  if (value === null) return "None";
  if (isBool(value)) return value ? "True" : "False";
  if (isInteger(value)) return String(Number.isSafeInteger(value) ? value : BigInt(value));
  if (value instanceof Float) return floatText(value.value);
  if (value instanceof Undefined) return "Undefined";
  if (value instanceof Tuple) return `(${items(value)}${value.length === 1 ? "," : ""})`;
  if (Array.isArray(value)) return `[${items(value)}]`;
  if (value instanceof Map) return `{${concat(Array.from(value, (pair) => pair.map(shown).join(": ")), ", ")}}`;
  if (value instanceof View && value.kind !== "range") return `dict_${value.kind}([${items(value.items)}])`;
  return wrong("a value with a text is expected", value);
}

/** str() of Python. */
function textOf(value) {
  if (isText(value)) return value;
  return value instanceof Safe ? value.text : value instanceof Undefined ? "" : shown(value);
}

function slice(value, start, stop, step) {
  if (!isSequence(value)) wrong("a text or a list is expected", value);
  const parts = isText(value) ? characters(value) : value;
  const by = step === null ? 1 : integer(step);
  if (!by) fail("slice step cannot be zero");
  const [low, high] = by < 0 ? [-1, parts.length - 1] : [0, parts.length];
  const bound = (end, otherwise) => {
    if (end === null) return otherwise;
    const at = integer(end);
    return Math.max(low, Math.min(at < 0 ? at + parts.length : at, high));
  };
  const end = bound(stop, by < 0 ? low : high);
  const made = value instanceof Tuple ? new Tuple() : [];
  for (let i = bound(start, by < 0 ? high : low); by < 0 ? i > end : i < end; i += by) {
    spend(1);
    made.push(parts[i]);
  }
  return isText(value) ? made.join("") : made;
}

/** Places of a text in another one, which do not overlap. */
function* matches(text, part) {
  if (wordOf(part) === "") fail("an empty text is looked for");
  search(text, part);
  for (let at = text.indexOf(part); at >= 0; at = text.indexOf(part, at + part.length)) {
    spend(1);
    yield at;
  }
}

/** Parts of a text, at most so many and the rest. */
function split(text, separator = null, most = -1, fromEnd = false) {
  const spots = []; // [begin, end] of separators
  const body = separator === null ? stripped(text, null, !fromEnd, fromEnd) : text;
  if (separator !== null) for (const at of matches(text, separator)) spots.push([at, at + separator.length]);
  else {
    const runs = body.matchAll(new RegExp(`[${SPACES}]+`, "g"));
    for (const { 0: found, index } of runs) spots.push([index, index + found.length]);
  }
  spend(text.length / CHARACTERS + spots.length);
  const count = integer(most) < 0 ? spots.length : Math.min(most, spots.length);
  const parts = [];
  let from = 0;
  for (const [begin, end] of fromEnd ? spots.slice(spots.length - count) : spots.slice(0, count)) {
    parts.push(body.slice(from, begin));
    from = end;
  }
  parts.push(body.slice(from));
  return separator === null ? parts.filter(Boolean) : parts;
}

function stripped(text, chars = null, atStart = true, atEnd = true) {
  const set = chars === null ? null : characters(wordOf(chars));
  const isOut = (each) => (set ? set.includes(each) : SPACE.test(each));
  const parts = set && isWide(text) ? characters(text) : text;
  let [from, to] = [0, parts.length];
  while (atStart && from < to && isOut(parts[from])) from++;
  while (atEnd && to > from && isOut(parts[to - 1])) to--;
  spend((from + parts.length - to) * (set?.length ?? 1) + text.length / CHARACTERS);
  const rest = parts.slice(from, to);
  return isText(rest) ? rest : rest.join("");
}

function lines(text, areEndsKept = false) {
  room(text.length);
  const parts = text.split(/(\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])/);
  spend(parts.length);
  const found = [];
  for (let i = 0; i < parts.length; i += 2) found.push(parts[i] + ((isTrue(areEndsKept) && parts[i + 1]) || ""));
  if (parts.at(-1) === "") found.pop();
  return found;
}

const lower = (text) => (room(text.length), text.toLowerCase());
const upper = (text) => (room(text.length), text.toUpperCase());

function capitalized(text) {
  const [first = ""] = text;
  const start = upper(first);
  return start.slice(0, 1) + lower(start.slice(1) + text.slice(first.length));
}

function replaced(text, old, now, most = -1) {
  const parts = [];
  let from = 0;
  integer(most);
  for (const at of matches(text, old)) {
    if (parts.length === most) break;
    parts.push(text.slice(from, at));
    from = at + old.length;
  }
  return concat([...parts, text.slice(from)], wordOf(now));
}

// Operators -------------------------------------------------------------------------------------------------

const table = (rows) => new Map(Object.entries(rows));

function equal(a, b) {
  spend(1);
  if (a instanceof Safe) return equal(a.text, b);
  if (b instanceof Safe) return equal(a, b.text);
  if (isNumber(a) && isNumber(b)) return numberOf(a) === numberOf(b);
  if (a === b || (a instanceof Undefined && b instanceof Undefined)) return true;
  if (Array.isArray(a) && Array.isArray(b)) {
    return kindOf(a) === kindOf(b) && a.length === b.length && a.every((item, i) => equal(item, b[i]));
  }
  if (!(a instanceof Map && b instanceof Map) || a.size !== b.size) return false;
  for (const [key, value] of a) if (!b.has(key) || !equal(value, b.get(key))) return false;
  return true;
}

/** Below zero, zero or above, as for sort(); NaN: there is no order. */
function compare(a, b) {
  spend(1);
  if (isNumber(a) && isNumber(b)) return numberOf(a) === numberOf(b) ? 0 : numberOf(a) - numberOf(b);
  if (!isSequence(a) || kindOf(a) !== kindOf(b)) wrong(`an order with ${kindOf(b)} is needed`, a);
  const [first, second] = isText(a) && isWide(a + b) ? [characters(a), characters(b)] : [a, b];
  let at = 0;
  while (at < first.length && at < second.length && equal(first[at], second[at])) at++;
  if (at === first.length || at === second.length) return first.length - second.length;
  return isText(a) ? first[at].codePointAt(0) - second[at].codePointAt(0) : compare(first[at], second[at]);
}

function contains(container, item) {
  if (isText(container)) {
    search(container, wordOf(item));
    return container.includes(item);
  }
  if (container instanceof Map) return container.has(keyOf(item));
  for (const other of each(container)) if (equal(other, item)) return true;
  return false;
}

const COMPARISONS = table({
  eq: equal,
  ne: (a, b) => !equal(a, b),
  lt: (a, b) => compare(a, b) < 0,
  lteq: (a, b) => compare(a, b) <= 0,
  gt: (a, b) => compare(a, b) > 0,
  gteq: (a, b) => compare(a, b) >= 0,
  in: (a, b) => contains(b, a),
  notin: (a, b) => !contains(b, a),
});

/** An operator of numbers: a float gives a float. */
const numeric = (compute, isFloat = false) => (a, b) => {
  for (const each of [a, b]) if (!isNumber(each)) wrong("a number is expected", each);
  const result = compute(numberOf(a), numberOf(b));
  return isFloat || a instanceof Float || b instanceof Float ? new Float(result) : whole(result);
};

const divisor = (value) => value || fail("division by zero");

function modulo(x, y) {
  const rest = x % divisor(y);
  return rest && rest < 0 !== y < 0 ? rest + y : rest;
}

function repeated(value, count) {
  const times = Math.max(0, integer(count));
  if (isText(value)) {
    room(value.length * times);
    return value.repeat(times);
  }
  spend(value.length * times);
  const made = value instanceof Tuple ? new Tuple() : [];
  for (let i = 0; i < times; i++) made.push(...value);
  return made;
}

const HTML = { "&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;" };
const escaped = (value) =>
  value instanceof Safe ? value.text : wordOf(value).replace(/[&<>'"]/g, (found) => HTML[found]);

const [sum, product] = [numeric((x, y) => x + y), numeric((x, y) => x * y)];
const OPERATORS = {
  add(a, b) {
    if (a instanceof Safe || b instanceof Safe) return new Safe(concat([escaped(a), escaped(b)]));
    if (!isSequence(a) || kindOf(a) !== kindOf(b)) return sum(a, b);
    if (isText(a)) return concat([a, b]);
    spend(a.length + b.length);
    return a.concat(b);
  },
  sub: numeric((x, y) => x - y),
  mul: (a, b) => (isSequence(a) ? repeated(a, b) : isSequence(b) ? repeated(b, a) : product(a, b)),
  div: numeric((x, y) => x / divisor(y), true),
  floordiv: numeric((x, y) => Math.round((x - modulo(x, y)) / y)),
  mod: numeric(modulo),
};

// Attributes and items --------------------------------------------------------------------------------------

const CHANGING = /^(append|clear|extend|insert|pop|popitem|remove|reverse|setdefault|sort|update)$/;

const edge = (test) => (text, parts) =>
  (parts instanceof Tuple ? parts : [parts]).some((part) => {
    spend(1 + wordOf(part).length / CHARACTERS);
    return test(text, part);
  });

function find(text, part) {
  search(text, wordOf(part));
  const at = text.indexOf(part);
  return at < 0 ? at : textLength(text.slice(0, at));
}

function itemsOf(map) {
  if (!(map instanceof Map)) wrong("a mapping is expected", map);
  return Array.from(map, (pair) => Tuple.from(pair));
}

const viewed = (kind, items) => (map) => {
  spend(map.size);
  return new View(kind, items(map));
};
const METHODS = {
  str: table({
    capitalize: capitalized,
    count: (text, part) => [...matches(text, part)].length,
    endswith: edge((text, part) => text.endsWith(part)),
    find,
    join: (text, values) => concat(list(values).map(wordOf), text),
    lower,
    lstrip: (text, chars) => stripped(text, chars, true, false),
    removeprefix: (text, part) => (text.startsWith(wordOf(part)) ? text.slice(part.length) : text),
    removesuffix: (text, part) => (wordOf(part) && text.endsWith(part) ? text.slice(0, -part.length) : text),
    replace: replaced,
    rsplit: (text, separator, most) => split(text, separator, most, true),
    rstrip: (text, chars) => stripped(text, chars, false, true),
    split: (text, separator, most) => split(text, separator, most),
    splitlines: lines,
    startswith: edge((text, part) => text.startsWith(part)),
    strip: (text, chars) => stripped(text, chars),
    title: (text) => text.replace(/\p{Cased}+/gu, capitalized),
    upper,
  }),
  dict: table({
    get: (map, key, otherwise = null) => (map.has(keyOf(key)) ? map.get(keyOf(key)) : otherwise),
    items: viewed("items", itemsOf),
    keys: viewed("keys", (map) => [...map.keys()]),
    values: viewed("values", (map) => [...map.values()]),
  }),
};

/** An attribute as Python's getattr() finds it; undefined if there is none. */
function ownAttribute(value, name) {
  const hasNone = [Undefined, Callable, Safe].some((kind) => value instanceof kind);
  if (hasNone) wrong("a value with attributes is expected", value);
  if (value instanceof Namespace) return value.entries.get(name);
  if (value instanceof Loop) return LOOP.get(name)?.(value);
  const method = METHODS[kindOf(value)]?.get(name);
  if (method) return new Callable((args) => method(value, ...args));
  const isUnsafe = /^__.*__$/s.test(name) || (CHANGING.test(name) && (Array.isArray(value) || value instanceof Map));
  return isUnsafe ? new Undefined(`access to attribute '${name}' of '${kindOf(value)}' object is unsafe.`) : undefined;
}

function ownItem(value, key) {
  if (value instanceof Undefined || value instanceof Safe) wrong("a value with items is expected", value);
  if (value instanceof Map) return Array.isArray(key) || key instanceof Map ? undefined : value.get(keyOf(key));
  const items = isText(value) && isWide(value) ? characters(value) : value?.kind === "range" ? value.items : value;
  if (!isSequence(items) || !(isInteger(key) || isBool(key))) return undefined;
  return items[key < 0 ? items.length + key : Number(key)];
}

const present = (found, value, name) =>
  found === undefined ? new Undefined(`'${kindOf(value)} object' has no attribute ${shown(name)}`) : found;

/** `value.name` */
function attribute(value, name) {
  const found = ownAttribute(value, name);
  return present(found === undefined ? ownItem(value, name) : found, value, name);
}

/** `value[key]` */
function item(value, key) {
  const found = ownItem(value, key);
  return present(found === undefined && isText(key) ? ownAttribute(value, key) : found, value, key);
}

/** `attribute` of a filter, such as "a.b.0". */
function getter(name = null, otherwise = null) {
  const parts = isText(name) ? name.split(".").map((part) => (/^\d+$/.test(part) ? Number(part) : part)) : [name];
  const step = (value, part) => {
    const found = item(value, part);
    return found instanceof Undefined && otherwise !== null ? otherwise : found;
  };
  return (value) => (name === null ? value : parts.reduce(step, value));
}

// Filters ---------------------------------------------------------------------------------------------------

function* changed(values, change) {
  for (const value of each(values)) {
    spend(1);
    yield change(value);
  }
}

function* chosen(values, test) {
  for (const value of each(values)) {
    spend(1);
    if (test(value)) yield value;
  }
}

const some = (values) => (isTrue(values) ? values : []); // what map and select go through
const folded = (value, isExact) => (isText(value) && !isTrue(isExact) ? lower(value) : value);

/** A copy in order. `keys` gives lists that are compared. */
function sorted(values, keys, isReversed = false) {
  const rows = values.map((value) => [keys(value), value]);
  const way = integer(isReversed) ? -1 : 1;
  rows.sort(([a], [b]) => way * compare(a, b));
  return rows.map(([, value]) => value);
}

const extreme = (isBetter) => (value, isExact = false, attribute = null) => {
  const key = (each) => folded(getter(attribute)(each), isExact);
  const values = list(value);
  if (!values.length) return new Undefined("No aggregated item, sequence was empty.");
  return values.reduce((best, each) => (isBetter(compare(key(each), key(best))) ? each : best));
};

function jsonOf(value, options, before = "\n") {
  spend(1);
  const { indent, comma, colon, isAscii, isSorted } = options;
  const inner = before + indent;
  const nested = (each) => jsonOf(each, options, inner);
  const wrap = (open, parts, close) => {
    if (!parts.length || indent === null) return concat([open, concat(parts, comma), close]);
    return concat([open, inner, concat(parts, comma + inner), before, close]);
  };
  const text = (each) => {
    room(each.length);
    const unicode = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
    return isTrue(isAscii) ? JSON.stringify(each).replace(/[^ -~]/g, unicode) : JSON.stringify(each);
  };
  if (isText(value) || value instanceof Safe) return text(textOf(value));
  if (value instanceof Float) return floatText(value.value).replace("nan", "NaN").replace("inf", "Infinity");
  if (value === null || isBool(value)) return String(value);
  if (isInteger(value)) return shown(value);
  if (Array.isArray(value) || value instanceof Lazy) return wrap("[", list(value).map(nested), "]");
  if (!(value instanceof Map)) wrong("a value that JSON has is expected", value);
  const pairs = isTrue(isSorted) ? sorted([...value], ([key]) => [key]) : [...value];
  const row = ([key, each]) => text(isText(key) ? key : String(key)) + colon + nested(each);
  return wrap("{", pairs.map(row), "}");
}

function parsed(value) {
  if (value instanceof Undefined) wrong("a number is expected", value);
  if (!isText(value)) return numberOf(value);
  const text = stripped(value);
  if (/^[+-]?(inf|nan)/i.test(text)) fail("inf and nan as texts of numbers are not known here");
  const isFloat = /^[+-]?(\d(_?\d)*\.?(\d(_?\d)*)?|\.\d(_?\d)*)(e[+-]?\d+)?$/i.test(text);
  return isFloat ? Number(text.replaceAll("_", "")) : undefined;
}

const FILTERS = table({
  capitalize: (value) => capitalized(textOf(value)),
  default: (value, otherwise = "", isBoolean = false) =>
    value instanceof Undefined || (isTrue(isBoolean) && !isTrue(value)) ? otherwise : value,
  dictsort(value, isExact = false, by = "key", isReversed = false) {
    const at = ["key", "value"].indexOf(by);
    if (at < 0) fail('You can only sort by either "key" or "value"');
    return sorted(itemsOf(value), (pair) => [folded(pair[at], isExact)], isReversed);
  },
  first(value) {
    for (const found of each(value)) return found;
    return new Undefined("No first item, sequence was empty.");
  },
  float(value, otherwise = new Float(0)) {
    const number = parsed(value);
    return number === undefined ? otherwise : new Float(number);
  },
  indent(value, width = 4, isFirst = false, isBlank = false) {
    const space = isText(width) ? width : repeated(" ", width);
    const parts = lines(`${wordOf(value)}\n`);
    const made = parts.map((line, i) => (i ? line || isTrue(isBlank) : isTrue(isFirst)) ? concat([space, line]) : line);
    return concat(made, "\n");
  },
  int(value, otherwise = 0) {
    const number = parsed(value);
    return number === undefined ? otherwise : whole(Math.trunc(number));
  },
  items(value) {
    if (value instanceof Undefined) return new Lazy([].values());
    return new Lazy(itemsOf(value).values());
  },
  join: (value, between = "", attribute = null) =>
    concat(list(value).map((each) => textOf(getter(attribute)(each))), textOf(between)),
  last(value) {
    if (value instanceof Lazy) wrong("a list is expected", value);
    const values = list(value);
    return values.length ? values.at(-1) : new Undefined("No last item, sequence was empty.");
  },
  length: lengthOf,
  list,
  lower: (value) => lower(textOf(value)),
  max: extreme((order) => order > 0),
  min: extreme((order) => order < 0),
  replace: (value, old, now, most = -1) => replaced(textOf(value), textOf(old), textOf(now), most ?? -1),
  reverse(value) {
    const values = list(value).reverse();
    return isText(value) ? values.join("") : value instanceof Lazy ? values : new Lazy(values.values());
  },
  safe: (value) => new Safe(textOf(value)),
  sort(value, isReversed = false, isExact = false, attribute = null) {
    const getters = (isText(attribute) ? attribute.split(",") : [attribute]).map((each) => getter(each));
    return sorted(list(value), (each) => getters.map((get) => folded(get(each), isExact)), isReversed);
  },
  string: (value) => (value instanceof Safe ? value : textOf(value)),
  tojson(value, isAscii = false, width = null, separators = null, isSorted = false) {
    const indent = width === null || isText(width) ? width : repeated(" ", width);
    const [comma, colon] = separators === null ? [indent === null ? ", " : ",", ": "] : list(separators).map(wordOf);
    return jsonOf(value, { indent, comma, colon, isAscii, isSorted });
  },
  trim: (value, chars) => stripped(textOf(value), chars),
  unique(value, isExact = false, attribute = null) {
    const known = new Set();
    const isNew = (key) => !known.has(key) && known.add(key);
    return new Lazy(chosen(value, (found) => isNew(keyOf(folded(getter(attribute)(found), isExact)))));
  },
  upper: (value) => upper(textOf(value)),
});
const OF_SAFE = ["default", "length", "safe", "string", "tojson"]; // filters that take what `safe` gives

const TESTS = table({
  ...Object.fromEntries(COMPARISONS),
  boolean: isBool,
  callable: (value) => value instanceof Callable || value instanceof Undefined,
  defined: (value) => !(value instanceof Undefined),
  divisibleby: (value, other) => equal(OPERATORS.mod(value, other), 0),
  even: (value) => equal(OPERATORS.mod(value, 2), 0),
  false: (value) => value === false,
  float: (value) => value instanceof Float,
  integer: isInteger,
  iterable: (value) => [Lazy, Loop, Safe].some((kind) => value instanceof kind) || partsOf(value) !== undefined,
  mapping: (value) => value instanceof Map,
  none: (value) => value === null,
  number: isNumber,
  odd: (value) => equal(OPERATORS.mod(value, 2), 1),
  sameas: (value, other) => value === other,
  sequence: (value) =>
    isSequence(value) || value?.kind === "range" || [Map, Undefined, Safe].some((kind) => value instanceof kind),
  string: (value) => isText(value) || value instanceof Safe,
  true: (value) => value === true,
  undefined: (value) => value instanceof Undefined,
});

// Loops and globals -----------------------------------------------------------------------------------------

/** `loop` of a template. What is lazy gives an item when it is needed, and no earlier. */
class Loop {
  constructor(values) {
    this.taken = values instanceof Lazy ? [] : list(values);
    this.source = values instanceof Lazy ? values.iterator : null;
    this.index = 0;
  }

  [Symbol.iterator]() {
    return { next: () => ({ value: this.at(this.index++), done: this.taken.length < this.index }) };
  }

  /** The item of a place; undefined: there is none. */
  at(place) {
    while (this.source && this.taken.length <= place) {
      const { value, done } = this.source.next();
      if (done) this.source = null;
      else this.taken.push(value);
    }
    return this.taken[place];
  }

  count() {
    this.at(Infinity);
    return this.taken.length;
  }
}

const neighbour = (value) => (value === undefined ? new Undefined("there is no such item") : value);
const LOOP = table({
  index: (loop) => loop.index,
  index0: (loop) => loop.index - 1,
  revindex: (loop) => loop.count() - loop.index + 1,
  revindex0: (loop) => loop.count() - loop.index,
  first: (loop) => loop.index === 1,
  last: (loop) => loop.at(loop.index) === undefined,
  length: (loop) => loop.count(),
  depth: () => 1,
  depth0: () => 0,
  previtem: (loop) => neighbour(loop.taken[loop.index - 2]),
  nextitem: (loop) => neighbour(loop.at(loop.index)),
  cycle: (loop) => new Callable((args) => neighbour(args[(loop.index - 1) % args.length])),
  changed: (loop) =>
    new Callable((args) => {
      const isSame = loop.seen !== undefined && equal(loop.seen, args);
      loop.seen = args;
      return !isSame;
    }),
});

const DAYS = "Sunday Monday Tuesday Wednesday Thursday Friday Saturday".split(" ");
const MONTHS = "January February March April May June July August September October November December".split(" ");
const two = (number) => String(number).padStart(2, "0");
const DATES = table({
  a: (date) => DAYS[date.getDay()].slice(0, 3),
  A: (date) => DAYS[date.getDay()],
  b: (date) => MONTHS[date.getMonth()].slice(0, 3),
  B: (date) => MONTHS[date.getMonth()],
  d: (date) => two(date.getDate()),
  H: (date) => two(date.getHours()),
  I: (date) => two(date.getHours() % 12 || 12),
  m: (date) => two(date.getMonth() + 1),
  M: (date) => two(date.getMinutes()),
  p: (date) => (date.getHours() < 12 ? "AM" : "PM"),
  S: (date) => two(date.getSeconds()),
  y: (date) => two(date.getFullYear() % 100),
  Y: (date) => String(date.getFullYear()),
  "%": () => "%",
});

function dictOf([first = new Map()], named) {
  return new Map([...mapping(first instanceof Map ? first : list(first).map(list)), ...named]);
}

const GLOBALS = table({
  range: new Callable((args) => {
    const [start, stop, step = 1] = (args.length === 1 ? [0, ...args] : args).map(integer);
    const length = Math.max(0, Math.ceil((integer(stop ?? null) - start) / divisor(step)));
    if (length > MOST_RANGE) fail(`Range too big. The sandbox blocks ranges larger than MAX_RANGE (${MOST_RANGE}).`);
    spend(length);
    return new View("range", Array.from({ length }, (_, i) => start + i * step));
  }),
  dict: new Callable(dictOf),
  namespace: new Callable((args, named) => new Namespace(dictOf(args, named))),
  raise_exception: new Callable(([message = wrong("a message is expected", null)]) => {
    const words = split(textOf(message).slice(0, 10 * LONGEST_PROBLEM)).join(" ").slice(0, LONGEST_PROBLEM);
    throw new TemplateError(words || "TemplateError", true);
  }),
  strftime_now: new Callable(([pattern]) => {
    const now = new Date();
    return wordOf(pattern).replace(/%(-?)(.)/gs, (_, dash, letter) => {
      const text = known(DATES, letter)(now);
      return dash ? text.replace(/^0(?=.)/, "") : text;
    });
  }),
});

// Expressions -----------------------------------------------------------------------------------------------
// A row makes a function of the parts of an expression: (frames) => value. Frames are the variables of the root and of
// macros, by place, outermost first.

const known = (rows, name) => rows.get(name) ?? fail(`the export has ${name}, which its template.js does not know`);

function expression(node) {
  if (!Array.isArray(node)) return () => node;
  const [name, ...parts] = node;
  const run = known(EXPRESSIONS, name)(...parts);
  return (frames, caller) => {
    spend(1);
    return run(frames, caller);
  };
}

const computed = (compute) => (...nodes) => {
  const parts = nodes.map(expression);
  return (frames) => compute(...parts.map((part) => part(frames)));
};

/** A filter or a test with its arguments, which are computed once: (frames) => (value) => value. */
function applied(rows, name, args) {
  const [run, parts] = [known(rows, name), args.map(expression)];
  const isForSafe = rows === TESTS || OF_SAFE.includes(name);
  return (frames) => {
    const values = parts.map((part) => part(frames));
    return (value) => {
      if (value instanceof Safe && !isForSafe) fail(`the filter ${name} of what safe gives is not known here`);
      return run(value, ...values);
    };
  };
}

const applying = (rows) => (name, node, ...args) => {
  const [part, bind] = [expression(node), applied(rows, name, args)];
  return (frames) => {
    const value = part(frames);
    return bind(frames)(value);
  };
};

/** `and`, `or` */
const deciding = (decides) => (...nodes) => {
  const [first, second] = nodes.map(expression);
  return (frames) => {
    const value = first(frames);
    return isTrue(value) === decides ? value : second(frames);
  };
};

const EXPRESSIONS = table({
  ...Object.fromEntries(Object.entries(OPERATORS).map(([name, run]) => [name, computed(run)])),
  absent: () => () => undefined, // an argument that is not given
  float: (value) => () => new Float(value),
  captured: () => () => captured,
  variable: (depth, slot, name) => (frames) => {
    const value = frames[depth].get(slot);
    return value === undefined ? new Undefined(`'${name}' is undefined`) : value;
  },
  list: computed((...items) => items),
  tuple: computed((...items) => Tuple.from(items)),
  dict: computed((...pairs) => mapping(pairs)),
  choose: (...nodes) => {
    const [test, first, second = () => new Undefined("the inline if-expression has no else")] = nodes.map(expression);
    return (frames) => (isTrue(test(frames)) ? first : second)(frames);
  },
  and: deciding(false),
  or: deciding(true),
  not: computed((value) => !isTrue(value)),
  neg: computed((value) => (value instanceof Float ? new Float(-value.value) : OPERATORS.sub(0, value))),
  pos: computed((value) => OPERATORS.sub(value, 0)),
  concat: computed((...parts) => concat(parts.map(textOf))),
  compare: (first, ...rest) => {
    const begin = expression(first);
    const chain = rest.map(([name, node]) => [known(COMPARISONS, name), expression(node)]);
    return (frames) => {
      let left = begin(frames);
      return chain.every(([test, part]) => {
        const right = part(frames);
        const isSo = test(left, right);
        left = right;
        return isSo;
      });
    };
  },
  attribute: computed(attribute),
  item: computed(item),
  slice: computed(slice),
  filter: applying(FILTERS),
  test: applying(TESTS),
  map: (name, node, ...args) => {
    const [part, bind] = [expression(node), applied(FILTERS, name, args)];
    return (frames) => {
      const values = some(part(frames));
      return new Lazy(changed(values, bind(frames)));
    };
  },
  map_attribute: computed((values, name, otherwise) => new Lazy(changed(some(values), getter(name, otherwise)))),
  select: (isWanted, test, node, key, ...args) => {
    const [part, name] = [expression(node), expression(key)];
    const bind = test === null ? () => isTrue : applied(TESTS, test, args);
    return (frames) => {
      const [values, get, run] = [some(part(frames)), getter(name(frames)), bind(frames)];
      return new Lazy(chosen(values, (value) => run(get(value)) === isWanted));
    };
  },
  call: (node, args, named = []) => {
    const [callee, parts] = [expression(node), args.map(expression)];
    const rows = named.map(([name, value]) => [name, expression(value)]);
    return (frames, caller) => {
      const called = callee(frames);
      const values = parts.map((part) => part(frames));
      const bound = new Map(rows.map(([name, value]) => [name, value(frames)]));
      if (caller) bound.set("caller", caller);
      return called instanceof Callable ? called.call(values, bound) : wrong("a function is expected", called);
    };
  },
});

// Statements ------------------------------------------------------------------------------------------------
// A row makes a function (frames) => what ends a loop, or undefined.

const [BREAK, CONTINUE] = ["break", "continue"];

function block(nodes) {
  const parts = nodes.map(([name, ...rest]) => known(STATEMENTS, name)(...rest));
  return (frames) => {
    for (const part of parts) {
      spend(1);
      const end = part(frames);
      if (end) return end;
    }
    return undefined;
  };
}

function write(text) {
  room(text.length);
  if (output.length + text.length > MOST_TEXT) room(Infinity);
  output += text;
}

/** Run a body with an output of its own: what ends a loop. */
function capture(body, frames) {
  const before = output;
  output = "";
  const end = body(frames);
  captured = output;
  output = before;
  return end;
}

function setter(target) {
  if (!Array.isArray(target)) return (frames, value) => void frames.at(-1).set(target, value);
  const [kind, ...rest] = target;
  if (kind === "attribute") {
    const [depth, slot, name] = rest;
    return (frames, value) => void frames[depth].get(slot).entries.set(name, value);
  }
  const parts = rest.map(setter);
  return (frames, value) => {
    const values = value instanceof Undefined ? wrong("values are expected", value) : list(value);
    if (values.length !== parts.length) fail(`${parts.length} values are expected, got ${values.length}`);
    parts.forEach((set, i) => set(frames, values[i]));
  };
}

function macro({ name, parameters, caller, kwargs, varargs, body }) {
  const run = block(body);
  return (frames) =>
    new Callable((args, named = new Map()) => {
      if (++calls > MOST_CALLS) fail("maximum recursion depth exceeded");
      const frame = new Map();
      const rest = new Map(named);
      parameters.forEach(([slot, key], i) => {
        frame.set(slot, i < args.length ? args[i] : rest.get(key));
        if (i >= args.length) rest.delete(key);
      });
      if (caller !== undefined) {
        frame.set(caller, rest.get("caller") ?? new Undefined("No caller defined"));
        rest.delete("caller");
      }
      if (kwargs !== undefined) frame.set(kwargs, rest);
      else if (rest.size) fail(`macro '${name}' takes no keyword argument '${[...rest.keys()][0]}'`);
      if (varargs !== undefined) frame.set(varargs, Tuple.from(args.slice(parameters.length)));
      else if (args.length > parameters.length) fail(`macro '${name}' takes ${parameters.length} argument(s)`);
      capture(run, [...frames, frame]);
      calls--;
      return captured;
    });
}

/** The items of a loop for which its condition holds. */
function taking({ target, enter, test }) {
  const [set, begin, isWanted] = [setter(target), block(enter), expression(test)];
  return (frames, values) => {
    const inner = [...frames, new Map()];
    begin(inner);
    const takes = (value) => {
      set(inner, value);
      return isTrue(isWanted(inner));
    };
    return new Lazy(chosen(values, takes));
  };
}

const STATEMENTS = table({
  output: (...nodes) => {
    const parts = nodes.map(expression);
    return (frames) => parts.forEach((part) => write(textOf(part(frames))));
  },
  capture: (body) => {
    const run = block(body);
    return (frames) => capture(run, frames);
  },
  set: (target, node) => {
    const [set, value] = [setter(target), expression(node)];
    return (frames) => set(frames, value(frames));
  },
  default: (slot, node) => {
    const value = expression(node);
    return (frames) => {
      if (frames.at(-1).get(slot) === undefined) frames.at(-1).set(slot, value(frames));
    };
  },
  // Before an attribute is set, and before its value is computed.
  namespace: (depth, slot) => (frames) => {
    if (!(frames[depth].get(slot) instanceof Namespace)) fail("cannot assign attribute on non-namespace object");
  },
  // What variables of a scope begin with: [slot], [slot, name of the caller's], [slot, depth, slot].
  enter: (...entries) => (frames) => {
    for (const [slot, from, other] of entries) {
      const value = isText(from) ? (variables.has(from) ? variables : GLOBALS).get(from) : frames[from]?.get(other);
      frames.at(-1).set(slot, value);
    }
  },
  leave: (...slots) => (frames) => slots.forEach((slot) => void frames.at(-1).delete(slot)),
  if: (branches, otherwise) => {
    const parts = branches.map(([test, body]) => [expression(test), block(body)]);
    const last = block(otherwise);
    return (frames) => {
      for (const [test, body] of parts) if (isTrue(test(frames))) return body(frames);
      return last(frames);
    };
  },
  for: ({ items, target, loop, condition, body, leave, otherwise }) => {
    const [values, set] = [expression(items), setter(target)];
    const [run, end, last] = [body, leave, otherwise].map(block);
    const filter = condition && taking(condition);
    return (frames) => {
      let rest = values(frames);
      if (filter) rest = filter(frames, rest);
      if (loop !== undefined) rest = new Loop(rest);
      let isEmpty = true;
      for (const value of each(rest)) {
        spend(1);
        set(frames, value);
        if (loop !== undefined) frames.at(-1).set(loop, rest);
        const ended = run(frames);
        isEmpty &&= Boolean(ended); // Jinja sees no item where its body did not end
        if (ended === BREAK) break;
      }
      end(frames);
      return isEmpty ? last(frames) : undefined;
    };
  },
  macro: (slot, about) => {
    const make = macro(about);
    return (frames) => void frames.at(-1).set(slot, make(frames));
  },
  call: (about, node) => {
    const [make, run] = [macro(about), expression(node)];
    return (frames) => write(textOf(run(frames, make(frames))));
  },
  break: () => () => BREAK,
  continue: () => () => CONTINUE,
});

// Templates -------------------------------------------------------------------------------------------------

/** The function of a compiled template: an object of variables → a text. */
export function templateFunction(body) {
  const run = block(body);
  return (values) => {
    [steps, calls, output] = [STEPS, 0, ""];
    try {
      variables = imported(values);
      run([new Map()]);
      return output;
    } catch (problem) {
      throw problem instanceof RangeError ? new TemplateError("maximum recursion depth exceeded") : problem;
    } finally {
      [output, captured, variables] = ["", "", new Map()];
    }
  };
}
