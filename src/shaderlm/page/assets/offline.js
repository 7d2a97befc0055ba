// Lets an export work without a network: registers its service worker, and says when there is a newer version.

import { note } from "./panel.js";

const WORKER = new URL("../sw.js", import.meta.url);
const ASK_MS = 5000; // for a server that does not answer

let registered = Promise.resolve(null); // the registration of the service worker

const use = (waiting) => waiting.postMessage("use the new version"); // and the page is loaded again

function offer(waiting) {
  note("update", "There is a new version of this page.", ["Reload", () => use(waiting)]);
}

/** Follow a version on its way. The first one that cannot be kept is told; later ones leave an older one in place. */
function follow(coming) {
  if (!coming) return;
  const isFirst = !navigator.serviceWorker.controller;
  let isInstalled = false;
  coming.addEventListener("statechange", () => {
    isInstalled ||= coming.state === "installed";
    if (coming.state === "installed" && !isFirst) offer(coming);
    if (coming.state === "redundant" && !isInstalled && isFirst) warn("not all of its files could be kept");
  });
}

function warn(reason) {
  note("offline", `This page will not work without its server: ${reason}.`);
}

/** Keep the page's files. What goes wrong is told: the page works, but only with its server. */
export async function keepForOffline() {
  if (!navigator.serviceWorker) return warn("this browser keeps nothing for it");
  // Another version took over, here or in another tab: a page of the old one must not fetch files of the new one. The
  // first version takes over as well, without need to load the page again.
  let isControlled = Boolean(navigator.serviceWorker.controller);
  navigator.serviceWorker.addEventListener("controllerchange", () => {
    if (isControlled) location.reload();
    isControlled = true;
  });
  try {
    registered = navigator.serviceWorker.register(WORKER);
    const registration = await registered;
    if (registration.waiting && navigator.serviceWorker.controller) offer(registration.waiting);
    follow(registration.installing);
    registration.addEventListener("updatefound", () => follow(registration.installing));
  } catch (problem) {
    if (!navigator.serviceWorker.controller) warn(problem.message); // else the worker that is there goes on
  }
}

/** Until a version is kept, or cannot be. */
const settled = (coming) => new Promise((resolve) => {
  coming.addEventListener("statechange", () => { if (coming.state !== "installing") resolve(); });
});

/** Ask the server for a newer version, and wait until it is kept. */
async function askForNewer(registration) {
  await registration.update();
  if (registration.installing) await settled(registration.installing);
}

/**
 * Use a newer version if there is one: the page is then loaded again, and this never ends. The old page would fetch the
 * new server's weights. isAsked: ask the server first, not only what has arrived.
 */
export async function useNewer({ isAsked }) {
  if (!navigator.serviceWorker?.controller) return; // the page came from the server
  const registration = await registered.catch(() => null);
  if (!registration) return;
  const late = new Promise((resolve) => { setTimeout(resolve, ASK_MS); });
  if (isAsked) await Promise.race([askForNewer(registration).catch(() => {}), late]); // it may be offline
  if (!registration.waiting) return;
  use(registration.waiting);
  await new Promise(() => {});
}

/** Ask the server for a newer version. People are told of it when it is there. */
export async function lookForNewer() {
  const registration = await registered.catch(() => null);
  await registration?.update().catch(() => {});
}
