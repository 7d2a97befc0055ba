// The page: joins conversations, answers, settings and what people do. Each part is in a file of its own.

import { Answer } from "./answer.js";
import { ConversationView } from "./conversation.js";
import { announce, byId, byTouch, grow, sends } from "./dom.js";
import { source as local } from "./local.js";
import { startMenu } from "./menu.js";
import { allowPictures, hasPictures, startPictures, take } from "./pictures.js";
import { source as server } from "./server.js";
import { openSettings, startSettings, summary } from "./settings.js";
import { showContext } from "./status.js";
import { Store } from "./store.js";
import { startTransfer } from "./transfer.js";

// An export says so in its index.html. Asking for its plan would be an error at every start on a server.
const source = document.documentElement.dataset.source === "local" ? local : server;

const SAVE_MS = 1000; // between two times that an answer is kept while it is being written
const NEAR_END = 60; // pixels: who reads the end stays at the end

const store = new Store((text) => { byId("notice").textContent = text; });
const running = new Map(); // id of a conversation → its Answer
const view = new ConversationView(byId("messages"), { edit, regenerate });
const menu = startMenu(store, { open, renamed, remove, restore });
const scroller = byId("scroller");
let current = null;
let isLeaving = false; // the browser ends requests of a page that is left: that is no problem to tell

// What is shown -----------------------------------------------------------------------------------------------

function show() {
  const answer = running.get(current.id);
  source.use(current.settings.model);
  view.show(current, source.model, answer?.message);
  byId("empty").hidden = current.messages.length > 0;
  byId("send").hidden = answer !== undefined;
  showReady();
  byId("stop").hidden = answer === undefined;
  byId("active").textContent = summary(current.settings, source.hasSchemas);
  showContext(current.messages);
  menu.show(current.id);
}

/** The source can answer now, or no longer. What people write meanwhile stays. */
function showReady() {
  allowPictures(Boolean(source.sees));
  byId("send").disabled = !source.isReady;
}

const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

function open(conversation) {
  current = conversation;
  history.replaceState(null, "", conversation.messages.length ? `#chat=${conversation.id}` : location.pathname);
  show();
  toEnd();
  if (!byTouch()) byId("prompt").focus(); // the keyboard on a screen would cover the text
}

function startNew() {
  open(store.create({ ...current?.settings }));
}

function remove(conversation) {
  running.get(conversation.id)?.stop();
  store.remove(conversation.id);
  if (conversation.id === current.id) startNew();
  else menu.show();
}

function restore(conversation) {
  store.save(conversation);
  open(conversation);
}

function renamed(conversation) {
  store.save(conversation);
  menu.show();
}

// Answers -----------------------------------------------------------------------------------------------------

async function answerTo(conversation) {
  // Until its end is known, an answer counts as one that the page left.
  const message = { role: "assistant", content: "", model: source.model, figures: {}, ended: "left" };
  conversation.messages.push(message);
  conversation.updated = Date.now();
  const answer = new Answer(conversation, message);
  running.set(conversation.id, answer);
  store.save(conversation);
  open(conversation);
  announce("The answer is being written");
  const draw = drawing(conversation, message);
  try {
    await answer.run(source, draw.soon);
  } finally {
    draw.end();
    running.delete(conversation.id);
  }
  if (isLeaving) return;
  if (store.get(conversation.id) === conversation) store.save(conversation); // it may be deleted meanwhile
  if (message.problem && (await source.recover(message.problem))) return again(conversation);
  if (conversation === current) ended(message);
  else menu.show();
}

// Draws once a frame at most, and keeps what came once a second.
function drawing(conversation, message) {
  let frame = null, saved = performance.now();
  const draw = () => {
    frame = null;
    if (conversation !== current) return;
    const follows = isAtEnd();
    view.update(message);
    showContext(current.messages);
    if (follows) toEnd();
  };
  const soon = () => {
    // There are no frames while nobody sees the page.
    if (!document.hidden) frame ??= requestAnimationFrame(draw);
    if (performance.now() - saved > SAVE_MS) {
      saved = performance.now();
      store.save(conversation);
    }
  };
  return { soon, end: () => cancelAnimationFrame(frame) };
}

function ended(message) {
  const follows = isAtEnd();
  const stopped = document.activeElement === byId("stop");
  show();
  if (follows) toEnd();
  if (stopped) byId("prompt").focus();
  const text = message.content.slice(0, 500);
  if (!message.problem) announce(message.ended === "stopped" ? "Stopped" : `The answer: ${text}`);
}

function again(conversation) {
  if (running.has(conversation.id)) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  answerTo(conversation);
}

function regenerate() {
  again(current);
}

function edit(message, text) {
  const at = current.messages.indexOf(message);
  if (running.has(current.id) || at < 0) return;
  current.messages.length = at;
  current.messages.push({ ...message, content: text });
  answerTo(current);
}

function send() {
  const field = byId("prompt");
  const text = field.value.trim();
  if (!(text || hasPictures()) || running.has(current.id)) return;
  if (!source.isReady) return announce("The model is not loaded yet");
  field.value = "";
  grow(field);
  const images = take();
  current.messages.push({ role: "user", content: text, ...(images.length ? { images } : {}) });
  answerTo(current);
}

function stop() {
  running.get(current.id)?.stop();
}

// What people do ----------------------------------------------------------------------------------------------

function startComposer() {
  startPictures((draw) => {
    const follows = isAtEnd();
    draw();
    if (follows) toEnd();
  });
  byId("prompt").addEventListener("input", () => grow(byId("prompt")));
  byId("prompt").addEventListener("keydown", (event) => {
    if (!sends(event)) return;
    event.preventDefault();
    send();
  });
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("stop").addEventListener("click", stop);
  for (const button of document.querySelectorAll("dialog .cancel")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]") && !menu.close()) stop();
  });
  byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("prompt").focus(); });
}

function startConversations() {
  for (const id of ["new", "new-short"]) byId(id).addEventListener("click", () => { menu.close(); startNew(); });
  byId("open-settings").addEventListener("click", () => openSettings(current.settings));
  byId("open-info").addEventListener("click", () => byId("info-dialog").showModal());
  startSettings((settings) => {
    const { model } = current.settings;
    current.settings = model ? { ...settings, model } : settings;
    store.save(current);
    byId("active").textContent = summary(settings, source.hasSchemas);
  }, source.hasSchemas);
  startTransfer(store, () => menu.show());
  addEventListener("hashchange", openFromAddress);
  addEventListener("pagehide", () => {
    isLeaving = true;
    running.forEach(({ conversation }) => store.save(conversation));
  });
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); }); // back to a page that was left
  addEventListener("storage", (event) => {
    if (!store.changed(event.key) || running.has(current.id)) return;
    current = store.get(current.id) ?? current;
    show();
  });
}

function openFromAddress() {
  const found = store.get(location.hash.replace("#chat=", ""));
  if (found) open(found);
  else startNew();
}

startComposer();
startConversations();
openFromAddress();
await source.start(showReady, (model) => {
  current.settings.model = model;
  store.save(current);
});
show();
