// Lets an export work without a network: registers its service worker, and says when there is a newer version.

import { note } from "./panel.js";

const WORKER = new URL("../sw.js", import.meta.url);

function offer(waiting) {
  const change = () => waiting.postMessage("use the new version");
  note("update", "There is a new version of this page.", ["Reload", change]);
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
  // Another version took over, here or in another tab: a page of the old one must not fetch files of the new one.
  const reload = () => location.reload();
  if (navigator.serviceWorker.controller) navigator.serviceWorker.addEventListener("controllerchange", reload);
  try {
    const registration = await navigator.serviceWorker.register(WORKER);
    if (registration.waiting && navigator.serviceWorker.controller) offer(registration.waiting);
    follow(registration.installing);
    registration.addEventListener("updatefound", () => follow(registration.installing));
  } catch (problem) {
    if (!navigator.serviceWorker.controller) warn(problem.message); // else the worker that is there goes on
  }
}
