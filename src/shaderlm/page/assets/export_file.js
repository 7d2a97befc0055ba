// Conversations as files: JSON, which import_file.js reads, and Markdown. Knows no page.

import { markdownOf, titleOf } from "./texts.js";

export const FORMAT = "shaderlm conversations";
export const VERSION = 1;
const SHORT = 60; // characters of a name

/** One file of all these conversations. */
export function toJson(conversations) {
  return `${JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1)}\n`;
}

const quoted = (text) => text.replace(/^/gm, "> ");
const line = (text) => text.replace(/\s+/g, " ").trim();

function messageToMarkdown(message) {
  if (message.role === "user") {
    const { length } = message.images ?? []; // a data URL is no text to read
    return ["## You", length && (length === 1 ? "*1 picture*" : `*${length} pictures*`), message.content].filter(Boolean);
  }
  const { thoughts, problem } = message;
  return [
    `## ${line(message.model ?? "Answer")}`, thoughts && quoted(thoughts), markdownOf(message),
    problem && `*${line(problem.title)}*`,
  ];
}

function conversationToMarkdown(conversation) {
  const { system } = conversation.settings;
  const parts = [`# ${line(titleOf(conversation))}`, ...(system ? ["## System prompt", system] : [])];
  return [...parts, ...conversation.messages.flatMap(messageToMarkdown)].filter(Boolean).join("\n\n");
}

export function toMarkdown(conversations) {
  return `${conversations.map(conversationToMarkdown).join("\n\n---\n\n")}\n`;
}

/** A name that all systems allow: letters and digits of a title. */
export function fileName(title, ending) {
  const words = title.normalize("NFC").replace(/[^\p{L}\p{M}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "");
  return `${[...words].slice(0, SHORT).join("") || "conversation"}.${ending}`;
}
