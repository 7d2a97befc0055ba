// Markdown as elements: blocks here, what is within a paragraph in inline.js. HTML in a text stays text.
//
// A text that grows is drawn again from the first block that changed: what is above keeps its place and selection.

import { copyButton, make } from "./dom.js";
import { highlighted } from "./highlight.js";
import { inline } from "./inline.js";

const MAX_NESTING = 8; // of lists and quotes; deeper ones are paragraphs
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}(?:\*[ \t]*\*[ \t]*\*[*\s]*|-[ \t]*-[ \t]*-[-\s]*|_[ \t]*_[ \t]*_[_\s]*)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?: |$)/;

const drawn = new WeakMap(); // element → the source of each block in it

/** Show a text in an element. Call it again as the text grows. */
export function showMarkdown(element, text) {
  const blocks = split(text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0);
  const before = drawn.get(element) ?? [];
  let same = 0;
  while (same < blocks.length && blocks[same].source === before[same]) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  element.append(...blocks.slice(same).map((block) => block.draw()));
  drawn.set(element, blocks.map((block) => block.source));
}

// Blocks: each reader gives the line after the block and a function that draws it, or null. ------------------------

function split(lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const start = i;
    let found = null;
    for (const read of READERS) found ??= read(lines, i, depth);
    const { end, draw } = found ?? readParagraph(lines, i, depth);
    i = end;
    blocks.push({ draw, source: lines.slice(start, end).join("\n"), isParagraph: found === null });
  }
  return blocks;
}

function readFence(lines, i) {
  const [, indent, fence, info] = FENCE.exec(lines[i]) ?? [];
  if (!fence) return null;
  let end = i + 1;
  while (end < lines.length && !closesFence(lines[end], fence)) end++;
  const code = lines.slice(i + 1, end).map((line) => dedent(line, indent.length)).join("\n");
  return { end: end + 1, draw: () => codeBlock(code, info.trim().split(/\s/, 1)[0]) };
}

function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text.startsWith(fence) && text === fence[0].repeat(text.length);
}

function codeBlock(code, language) {
  const name = language.slice(0, 30);
  const label = make("span", {}, name || "code");
  const head = make("div", { class: "code-head" }, label, copyButton(() => code, "Copy code"));
  const pre = make("pre", { tabindex: 0, role: "group", "aria-label": name ? `Code: ${name}` : "Code" });
  pre.append(make("code", {}, ...highlighted(code, name)));
  return make("div", { class: "code" }, head, pre);
}

function readHeading(lines, i) {
  const [marks] = HEADING.exec(lines[i]) ?? [];
  if (!marks) return null;
  let text = lines[i].slice(marks.length).trim();
  const bare = trimEnd(text, "#");
  if (bare === "" || bare.endsWith(" ")) text = bare.trim();
  const level = Math.min(6, marks.trim().length + 2); // the page has two levels of its own
  return { end: i + 1, draw: () => make(`h${level}`, {}, ...inline(text)) };
}

function trimEnd(text, c) {
  let end = text.length;
  while (end && text[end - 1] === c) end--;
  return text.slice(0, end);
}

function readRule(lines, i) {
  return RULE.test(lines[i]) ? { end: i + 1, draw: () => make("hr") } : null;
}

function readQuote(lines, i, depth) {
  if (depth >= MAX_NESTING || !QUOTE.test(lines[i])) return null;
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inside = split(lines.slice(i, end).map((line) => line.replace(QUOTE, "")), depth + 1);
  return { end, draw: () => make("blockquote", {}, ...inside.map((block) => block.draw())) };
}

function indentOf(line) {
  let n = 0;
  while (line[n] === " ") n++;
  return n;
}

const dedent = (line, most) => line.slice(Math.min(most, indentOf(line)));

function readList(lines, i, depth) {
  const first = depth < MAX_NESTING ? ITEM.exec(lines[i]) : null;
  if (!first) return null;
  const ordered = first[3] !== undefined;
  const items = [];
  let at = i, isLoose = false;
  while (at < lines.length) {
    const mark = ITEM.exec(lines[at]);
    if (!mark || (mark[3] !== undefined) !== ordered || mark[1].length > first[1].length + 1) break;
    if (mark[1].length < first[1].length || RULE.test(lines[at])) break;
    const end = itemEnd(lines, at, mark);
    const width = mark[0].trimEnd().length + 1;
    const inside = [lines[at].slice(mark[0].length), ...lines.slice(at + 1, end).map((line) => dedent(line, width))];
    items.push(split(inside, depth + 1));
    at = end;
    while (at < lines.length && !lines[at].trim()) at++;
    const goes = at < lines.length && ITEM.test(lines[at]);
    isLoose ||= (goes && at > end) || inside.some((line, n) => !line.trim() && n > 0 && n < inside.length - 1);
    if (!goes) at = Math.min(at, end);
  }
  const start = ordered && Number(first[3]) !== 1 ? Number(first[3]) : null;
  const draw = () => make(ordered ? "ol" : "ul", { start }, ...items.map((blocks) => listItem(blocks, isLoose)));
  return { end: at, draw };
}

// The lines of an item: those that are indented, and those that go on with its paragraph.
function itemEnd(lines, at, mark) {
  const indent = mark[1].length + 2;
  let end = at + 1;
  for (let next = end; next < lines.length; next++) {
    if (!lines[next].trim()) continue;
    const goesOn = next === end && !startsBlock(lines, next);
    if (indentOf(lines[next]) < indent && !goesOn) break;
    end = next + 1;
  }
  return end;
}

function listItem(blocks, isLoose) {
  const item = make("li");
  for (const block of blocks) {
    const node = block.draw();
    if (block.isParagraph && !isLoose) item.append(...node.childNodes);
    else item.append(node);
  }
  return item;
}

// Tables --------------------------------------------------------------------------------------------------

function cells(line) {
  const found = [""];
  const text = line.trim();
  for (let i = text[0] === "|" ? 1 : 0; i < text.length; i++) {
    if (text[i] === "\\" && text[i + 1] === "|") found[found.length - 1] += text[i++] + text[i];
    else if (text[i] === "|") found.push("");
    else found[found.length - 1] += text[i];
  }
  if (found.at(-1).trim() === "" && found.length > 1) found.pop();
  return found.map((cell) => cell.trim());
}

function readTable(lines, i) {
  if (!lines[i].includes("|") || !lines[i + 1]?.includes("-") || !/^[\s|:-]+$/.test(lines[i + 1])) return null;
  const head = cells(lines[i]);
  const rule = cells(lines[i + 1]);
  if (head.length !== rule.length || !rule.every((cell) => /^:?-+:?$/.test(cell))) return null;
  let end = i + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end++;
  const sides = rule.map((cell) => (cell.endsWith(":") ? (cell[0] === ":" ? "middle" : "end") : null));
  const row = (tag, line) => make("tr", {}, ...cells(line).slice(0, head.length).map(
    (cell, n) => make(tag, { class: sides[n], scope: tag === "th" ? "col" : null }, ...inline(cell)),
  ));
  const draw = () => {
    const body = make("tbody", {}, ...lines.slice(i + 2, end).map((line) => row("td", line)));
    const table = make("table", {}, make("thead", {}, row("th", lines[i])), body);
    return make("div", { class: "table", tabindex: 0, role: "group", "aria-label": "Table" }, table);
  };
  return { end, draw };
}

// Paragraphs ----------------------------------------------------------------------------------------------

const READERS = [readFence, readHeading, readRule, readQuote, readTable, readList];

function startsBlock(lines, i) {
  const line = lines[i];
  const mark = ITEM.exec(line);
  const item = mark !== null && mark[0].length < line.length;
  return item || [FENCE, HEADING, RULE, QUOTE].some((each) => each.test(line)) || readTable(lines, i) !== null;
}

function readParagraph(lines, i, depth) {
  let end = i + 1;
  // Too deep for lists and quotes, every line is text.
  while (end < lines.length && lines[end].trim() && (depth >= MAX_NESTING || !startsBlock(lines, end))) end++;
  const text = lines.slice(i, end).map((line) => line.trim()).join("\n");
  return { end, draw: () => make("p", {}, ...inline(text)) };
}
