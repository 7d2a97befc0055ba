// Markdown within a paragraph: emphasis, code, links. The time is linear in the length of the text, and nesting has a
// limit, whatever a model writes.

import { make } from "./dom.js";

const MAX_NESTING = 16;
const MAX_LABEL = 1000; // characters of a link's text
const MAX_URL = 2000;
const ESCAPED = new Set("*_`~#|<>!+-.\\&");
const ENTITIES = { "&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0" };
const TAGS = { "*1": "em", "_1": "em", "*2": "strong", "_2": "strong", "~2": "del" };
const isSpace = (c) => c === undefined || /\s/.test(c);
const isWord = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

/** Only addresses that a click may lead to; null for all others (javascript:, data:, …). */
export function safeAddress(text) {
  let found;
  try { found = new URL(text); } catch { return null; }
  return ["http:", "https:", "mailto:"].includes(found.protocol) ? found.href : null;
}

function link(address, ...children) {
  return make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

// What is open: emphasis whose end has not come. A frame that is never closed becomes the text that it was.
class Frames {
  constructor() {
    this.stack = [{ mark: "", children: [] }];
  }

  get top() { return this.stack[this.stack.length - 1]; }

  add(child) {
    if (child === "") return;
    const { children } = this.top;
    const last = children.length - 1;
    if (typeof child === "string" && typeof children[last] === "string") children[last] += child;
    else children.push(child);
  }

  open(mark) {
    if (this.stack.length > MAX_NESTING) this.add(mark);
    else this.stack.push({ mark, children: [] });
  }

  dissolve() {
    const { mark, children } = this.stack.pop();
    [mark, ...children].forEach((child) => this.add(child));
  }

  // Close the nearest frame with this mark. Frames inside it that are still open become text.
  close(mark) {
    const at = this.stack.findLastIndex((frame) => frame.mark === mark);
    if (at < 1 || (at === this.stack.length - 1 && !this.top.children.length)) return false;
    while (this.stack.length - 1 > at) this.dissolve();
    const { children } = this.stack.pop();
    this.add(make(TAGS[mark[0] + mark.length], {}, ...children));
    return true;
  }

  finish() {
    while (this.stack.length > 1) this.dissolve();
    return this.top.children;
  }
}

/** Nodes and strings for the text of a paragraph. */
export function inline(text, links = true) {
  const frames = new Frames();
  const withoutEnd = new Set(); // lengths of runs of backticks that do not come again
  let i = 0;
  while (i < text.length) {
    const c = text[i];
    const read = READERS[c];
    const end = read ? read(text, i, frames, withoutEnd, links) : null;
    if (end !== null) {
      i = end;
      continue;
    }
    let next = i + 1;
    while (next < text.length && !READERS[text[next]]) next++;
    frames.add(text.slice(i, next));
    i = next;
  }
  return frames.finish();
}

// Each reads what begins at i, and gives the place after it; null: it is only text.

function readEscape(text, i, frames) {
  if (text[i + 1] === "\n") frames.add(make("br"));
  else if (ESCAPED.has(text[i + 1])) frames.add(text[i + 1]);
  else return null;
  return i + 2;
}

function readBreak(text, i, frames) {
  frames.add(make("br"));
  return i + 1;
}

function run(text, i) {
  let end = i;
  while (text[end] === text[i]) end++;
  return end;
}

function readCode(text, i, frames, withoutEnd) {
  const start = run(text, i);
  const length = start - i;
  for (let at = withoutEnd.has(length) ? -1 : text.indexOf("`", start); at >= 0; at = text.indexOf("`", at)) {
    const end = run(text, at);
    if (end - at === length) {
      const inside = text.slice(start, at).replaceAll("\n", " ");
      const padded = inside.length > 2 && inside[0] === " " && inside.at(-1) === " " && inside.trim();
      frames.add(make("code", {}, padded ? inside.slice(1, -1) : inside));
      return end;
    }
    at = end;
  }
  withoutEnd.add(length);
  frames.add(text.slice(i, start));
  return start;
}

function readEmphasis(text, i, frames) {
  const c = text[i];
  const end = run(text, i);
  const before = text[i - 1], after = text[end];
  const word = c === "_"; // of snake_case, no part is emphasised
  const opens = !isSpace(after) && !(word && isWord(before));
  const closes = !isSpace(before) && !(word && isWord(after));
  let left = end - i;
  if (left > 3 || (c === "~" && left !== 2)) left = 0;
  while (closes && left) {
    const size = [2, 1].find((n) => n <= left && `${c}${n}` in TAGS && frames.close(c.repeat(n)));
    if (!size) break;
    left -= size;
  }
  if (end - i > 3 || (c === "~" && end - i !== 2)) frames.add(text.slice(i, end));
  else if (!opens) frames.add(c.repeat(left));
  else if (left === 3) [1, 2].forEach((n) => frames.open(c.repeat(n)));
  else if (left) frames.open(c.repeat(left));
  return end;
}

// Where a bracket closes, within the longest label.
function closing(text, i, open, close, most) {
  let depth = 0;
  for (let at = i; at < Math.min(text.length, i + most); at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === open) depth++;
    else if (text[at] === close && --depth === 0) return at;
  }
  return -1;
}

function readLink(text, i, frames, withoutEnd, links) {
  const middle = links ? closing(text, i, "[", "]", MAX_LABEL) : -1;
  if (middle < 0 || text[middle + 1] !== "(") return null;
  const end = closing(text, middle + 1, "(", ")", MAX_URL);
  if (end < 0) return null;
  const [address] = text.slice(middle + 2, end).trim().split(/\s/, 1); // a title may follow
  const found = safeAddress(address.replace(/^<|>$/g, ""));
  if (found === null) return null;
  frames.add(link(found, ...inline(text.slice(i + 1, middle), false)));
  return end + 1;
}

// Images are not fetched: nothing is asked of other servers unless somebody clicks.
function readImage(text, i, frames, withoutEnd, links) {
  if (text[i + 1] !== "[") return null;
  return readLink(text, i + 1, frames, withoutEnd, links);
}

const ANGLE = /<(?:(br) ?\/?|(https?:\/\/[^\s<>]{1,2000}|mailto:[^\s<>]{1,200}))>/iy;

function readAngle(text, i, frames, withoutEnd, links) {
  ANGLE.lastIndex = i;
  const found = ANGLE.exec(text);
  if (!found) return null;
  const address = found[2] && safeAddress(found[2]);
  if (found[1]) frames.add(make("br"));
  else if (address && links) frames.add(link(address, found[2]));
  else return null;
  return ANGLE.lastIndex;
}

const BARE = /https?:\/\/[^\s<>"'`|*\\]{1,2000}/iy;

function readAddress(text, i, frames, withoutEnd, links) {
  BARE.lastIndex = i;
  let found = links && !isWord(text[i - 1]) && BARE.exec(text)?.[0];
  if (!found) return null;
  let closes = found.split(")").length - found.split("(").length;
  while (/[.,;:!?_~\])]/.test(found.at(-1))) {
    if (found.at(-1) === ")" && closes-- <= 0) break;
    found = found.slice(0, -1);
  }
  const address = safeAddress(found);
  if (address === null) return null;
  frames.add(link(address, found));
  return i + found.length;
}

function readEntity(text, i, frames) {
  const name = Object.keys(ENTITIES).find((each) => text.startsWith(each, i));
  if (!name) return null;
  frames.add(ENTITIES[name]);
  return i + name.length;
}

const READERS = {
  "\\": readEscape, "\n": readBreak, "`": readCode, "*": readEmphasis, "_": readEmphasis, "~": readEmphasis,
  "[": readLink, "!": readImage, "<": readAngle, h: readAddress, H: readAddress, "&": readEntity,
};
