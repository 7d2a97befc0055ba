// Which messages of a conversation the model sees: where its context is full, the oldest turns are left out, by the rule
// of `shaderlm chat`. Knows no page.

import { tooLong } from "./problems.js";

const ANSWER_TOKENS = 1024; // at most, where people set nothing: as `shaderlm chat`
const UNSEEN = [256, 64]; // bytes that a template may add: to a conversation, to a message

/** Tokens of an answer at most, where people set nothing. */
export const answerLimit = (context) => Math.min(ANSWER_TOKENS, context);

/** The conversation as a source takes it. Answers that failed are left out; what a person said twice is joined. */
export function turns(messages, system) {
  const found = system ? [{ role: "system", content: system }] : [];
  for (const { role, content: text, images = [] } of messages) {
    if (!text && !images.length) continue;
    const content = images.length ? [...images.map(imagePart), ...partsOf(text)] : text;
    const last = found.at(-1);
    if (role !== "user" || last?.role !== "user") found.push({ role, content });
    else if (images.length || Array.isArray(last.content)) last.content = [...partsOf(last.content), ...partsOf(content)];
    else last.content += `\n\n${content}`;
  }
  return found;
}

const imagePart = (url) => ({ type: "image_url", image_url: { url } });
const partsOf = (content) => (Array.isArray(content) ? content : content ? [{ type: "text", text: content }] : []);

/** A token is at least a byte. So most conversations need not be counted. */
function mostTokens(sent) {
  if (sent.some(({ content }) => Array.isArray(content))) return Infinity; // what a picture has, its model says
  const bytes = sent.reduce((sum, { content }) => sum + new TextEncoder().encode(content).length, 0);
  return bytes + UNSEEN[0] + UNSEEN[1] * sent.length;
}

/**
 * The first message that the model sees, from `first` on, so that an answer fits too. `count` gives the tokens of what
 * `turns` makes. Where turns must go, twice the tokens of an answer are made free: each time the model reads all others
 * again.
 */
export async function firstThatFits(messages, first, { system, answer, context, count }) {
  const room = Math.min(answer, Math.floor(context / 4));
  const sent = (at) => turns(messages.slice(at), system);
  if (mostTokens(sent(first)) + room <= context || (await count(sent(first))) + room <= context) return first;
  const starts = messages.flatMap(({ role }, at) => (at > first && role === "user" ? [at] : []));
  starts.unshift(first);
  let [low, high] = [0, starts.length - 1]; // the last message stays, however long it is
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((await count(sent(starts[middle]))) + 2 * room <= context) high = middle;
    else low = middle + 1;
  }
  const used = await count(sent(starts[low]));
  if (used > context) throw tooLong(used, context, Boolean(system));
  return starts[low];
}
