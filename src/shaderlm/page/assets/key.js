// The key of a server that wants one: asked for in a dialog, kept for this tab, or for this browser if people say so.

import { useKey } from "./api.js";
import { byId } from "./dom.js";

const NAME = "shaderlm.key";

function kept() {
  try { return sessionStorage.getItem(NAME) ?? localStorage.getItem(NAME); } catch { return null; }
}

function keep(key, forLater) {
  try {
    sessionStorage.setItem(NAME, key);
    if (forLater) localStorage.setItem(NAME, key);
    else localStorage.removeItem(NAME);
  } catch { /* it lasts as long as the page */ }
}

let hasKey = false;
let asking = null; // one dialog, whoever asks

export function startKey() {
  const key = kept();
  hasKey = key !== null;
  useKey(key);
}

/** Ask for a key. False: nobody gave one. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    byId("key-wrong").hidden = !hasKey;
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "use" ? field.value.trim() : "";
      if (given) {
        hasKey = true;
        keep(given, byId("key-keep").checked);
        useKey(given);
      }
      field.value = "";
      resolve(given !== "");
    }, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}
