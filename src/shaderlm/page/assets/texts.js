// What a conversation says, as text: its title, and its answers as Markdown. Knows no page.

export const TITLE_LENGTH = 200; // of a name that people give, at most
const SHOWN = 60; // characters of a first message that stand for a name

/** What people call it, or the beginning of its first message. */
export function titleOf(conversation) {
  return conversation.title || firstWords(conversation) || "New chat";
}

/** The beginning of its first message. */
export function firstWords(conversation) {
  const text = conversation.messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const line = text.split("\n", 1)[0];
  return line.length > SHOWN ? `${line.slice(0, SHOWN - 1)}…` : line;
}

/** An answer as Markdown. JSON is shown as it is, within a fence that is not in it. */
export function markdownOf({ content, isJson }) {
  if (!isJson || !content) return content;
  let fence = "```";
  while (content.includes(fence)) fence += "`";
  return `${fence}json\n${content}\n${fence}`;
}
