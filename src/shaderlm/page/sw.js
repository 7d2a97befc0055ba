// Service worker of an export: keeps the page, the runtime and the plan, so that they are there without a network. What
// the plan lists, weights and tokenizer, the runtime keeps: it is large, and nobody may want it yet.
//
// A version is all files of FILES, each with its hash. It is kept whole or not at all, and answers until another one
// takes over. That happens when no page uses it any more, or when people say so. So files of two exports never mix.

const VERSION = "";
const FILES = {};

const scope = new URL(self.registration.scope).pathname;
const PREFIX = `shaderlm page ${scope} `;
const CACHE = PREFIX + VERSION;

async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A file of this version from the server. Throws if the server has another one. */
async function fetched(path) {
  const response = await fetch(new URL(path, self.registration.scope), { cache: "no-cache" });
  if (!response.ok) throw new Error(`${path} has status ${response.status}`);
  const bytes = await response.arrayBuffer();
  if ((await sha256(bytes)) !== FILES[path]) throw new Error(`${path} belongs to another version`);
  const headers = new Headers(response.headers);
  for (const name of ["Content-Encoding", "Content-Length"]) headers.delete(name); // of what was sent
  return new Response(bytes, { headers });
}

async function install() {
  const made = await Promise.all(Object.keys(FILES).map(async (path) => [path, await fetched(path)]));
  const cache = await caches.open(CACHE);
  try {
    for (const [path, response] of made) await cache.put(new URL(path, self.registration.scope), response);
  } catch (problem) {
    await caches.delete(CACHE); // storage may be full: a part of a version is of no use
    throw problem;
  }
}

async function removeOthers() {
  const names = await caches.keys();
  await Promise.all(names.filter((name) => name.startsWith(PREFIX) && name !== CACHE).map((name) => caches.delete(name)));
}

async function answer(path) {
  const found = await caches.match(new URL(path, self.registration.scope), { cacheName: CACHE });
  return found ?? fetched(path);
}

self.addEventListener("install", (event) => event.waitUntil(install()));
// A page of a first visit came from the server. From now on it gets files of this version alone, too.
self.addEventListener("activate", (event) => event.waitUntil(removeOthers().then(() => self.clients.claim())));
self.addEventListener("message", ({ data }) => {
  if (data === "use the new version") self.skipWaiting();
});
self.addEventListener("fetch", (event) => {
  const url = new URL(event.request.url);
  if (event.request.method !== "GET" || url.origin !== location.origin || !url.pathname.startsWith(scope)) return;
  const path = decodeURIComponent(url.pathname.slice(scope.length)) || "index.html";
  if (Object.hasOwn(FILES, path)) event.respondWith(answer(path));
});
