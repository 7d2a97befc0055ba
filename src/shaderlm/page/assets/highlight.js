// Colours in code: comments, strings, numbers and keywords. One pass over the text; what is not known stays plain.

import { make } from "./dom.js";

const MAX_CHARACTERS = 20_000; // longer code stays plain: it is drawn again while it grows

const HASH = "#[^\\n]*";
const SLASHES = "//[^\\n]*|/\\*[\\s\\S]*?(?:\\*/|$)";
const QUOTED = "'''[\\s\\S]*?(?:'''|$)|'(?:[^'\\\\\\n]|\\\\.){0,200}'";
const CHARACTER = "'(?:[^'\\\\\\n]|\\\\.)'"; // in Rust, other quotes have no end

// What comments are, what single quotes are, and for which languages.
const FAMILIES = [
  [HASH, QUOTED, "python py bash sh shell zsh console yaml yml toml ini ruby rb r perl make makefile dockerfile"],
  [SLASHES, QUOTED, "javascript js jsx typescript ts tsx c cpp c++ h hpp cs csharp java kotlin swift go wgsl glsl hlsl css"],
  [SLASHES, CHARACTER, "rust rs"],
  ["--[^\\n]*", QUOTED, "sql lua haskell"],
  ["(?!)", "(?!)", "json jsonc"],
];

const KEYWORDS = new Set((
  "and as async await bool break case catch char class const continue default def del delete do done double "
  + "echo elif else enum esac except export extends false False fi final finally float fn for from func function "
  + "global if impl import in int interface is lambda let loop match mod module mut namespace new nil None "
  + "nonlocal not null or override package pass private protected public pub raise return self static struct "
  + "super switch template then this throw trait true True try type typedef typeof undefined union unsafe use "
  + "using var virtual void while with yield"
).split(" "));
const SQL_KEYWORDS = new Set((
  "and as asc between by case create delete desc distinct drop else end exists from full group having in index "
  + "inner insert into is join left like limit not null on or order outer primary right select set table then "
  + "union update values view when where with"
).split(" "));

const STRINGS = '"""[\\s\\S]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|`(?:[^`\\\\]|\\\\[\\s\\S])*`?';
const REST = "(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)";
const CLASSES = ["comment", "string", "number", "keyword"];

const patterns = new Map(FAMILIES.flatMap(([comment, quoted, names]) => {
  const pattern = new RegExp(`(${comment})|(${STRINGS}|${quoted})|${REST}`, "g");
  return names.split(" ").map((name) => [name, pattern]);
}));

/** Code as nodes and strings. */
export function highlighted(code, language) {
  const pattern = patterns.get(language.toLowerCase());
  if (!pattern || code.length > MAX_CHARACTERS) return [code];
  const isSql = language.toLowerCase() === "sql";
  const isKeyword = (word) => (isSql ? SQL_KEYWORDS.has(word.toLowerCase()) : KEYWORDS.has(word));
  const found = [];
  let plain = 0;
  for (const match of code.matchAll(pattern)) {
    const kind = CLASSES[match.slice(1).findIndex((group) => group !== undefined)];
    if (kind === "keyword" && !isKeyword(match[0])) continue;
    if (match.index > plain) found.push(code.slice(plain, match.index));
    found.push(make("span", { class: kind }, match[0]));
    plain = match.index + match[0].length;
  }
  if (plain < code.length) found.push(code.slice(plain));
  return found;
}
