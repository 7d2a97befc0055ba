// Finds conversations by words: in their titles, and in what was said. Knows no page.

import { titleOf } from "./texts.js";

const AROUND = 32; // characters that are shown before and after a word

const pattern = (word) => new RegExp(word.replace(/[\^$\\.*+?()[\]{}|/]/g, "\\$&"), "iu");

/** A word of a text, with what stands around it: [before, word, after]. */
function excerptOf(text, match) {
  const end = match.index + match[0].length;
  const [from, to] = [Math.max(0, match.index - AROUND), Math.min(text.length, end + AROUND)];
  const parts = [text.slice(from, match.index), match[0], text.slice(end, to)].map((part) => part.replace(/\s+/g, " "));
  return [(from ? "…" : "") + parts[0], parts[1], parts[2] + (to < text.length ? "…" : "")];
}

function look(conversation, patterns) {
  const texts = [titleOf(conversation), ...conversation.messages.map(({ content }) => content)];
  let excerpt = null;
  for (const each of patterns) {
    const at = texts.findIndex((text) => each.test(text));
    if (at < 0) return null;
    if (at > 0) excerpt ??= excerptOf(texts[at], each.exec(texts[at]));
  }
  return { conversation, excerpt };
}

/** Those that have all words of a query, in their order, each with an excerpt; null: the words are in its title. */
export function search(conversations, query) {
  const patterns = query.split(/\s+/).filter(Boolean).map(pattern);
  return conversations.map((each) => look(each, patterns)).filter(Boolean);
}
