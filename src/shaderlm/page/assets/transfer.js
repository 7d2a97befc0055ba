// Takes conversations out of this browser and in again: the dialog for all of them, and files that people download.

import { byId, download } from "./dom.js";
import { fileName, toJson, toMarkdown } from "./export_file.js";
import { fromJson, ImportError, textOf } from "./import_file.js";
import { settingsOfFile } from "./settings.js";
import { StorageFullError } from "./store.js";

const WRITERS = {
  json: [toJson, "application/json"],
  md: [toMarkdown, "text/markdown"],
};

/** Download conversations as a file. kind: json or md. */
export function exportFile(conversations, title, kind) {
  const [write, type] = WRITERS[kind];
  download(fileName(title, kind), write(conversations), type);
}

const some = (n, one, several) => (n === 1 ? one : `${n} ${several}`);

function resultText(added, known) {
  const here = some(known, "One is here already.", "are here already.");
  if (!added) return some(known, "This conversation is", "conversations are").concat(" here already.");
  const news = some(added, "One conversation is imported.", "conversations are imported.");
  return known ? `${news} ${here}` : news;
}

async function importFile(store, file) {
  try {
    const given = fromJson(await textOf(file), settingsOfFile);
    const added = store.add(given);
    return resultText(added, given.length - added);
  } catch (problem) {
    if (problem instanceof ImportError) return `Nothing is imported. ${problem.message}`;
    if (!(problem instanceof StorageFullError)) throw problem;
    return "Nothing is imported. The browser's space for this page is too small for these conversations.";
  }
}

/** `imported` is called when there are other conversations. */
export function startTransfer(store, imported) {
  const dialog = byId("transfer-dialog");
  const field = byId("import-file");
  const day = () => new Date().toISOString().slice(0, 10);
  for (const [id, kind] of [["all-json", "json"], ["all-markdown", "md"]]) {
    byId(id).addEventListener("click", () => exportFile(store.list(), `shaderlm ${day()}`, kind));
  }
  field.addEventListener("change", async () => {
    const [file] = field.files;
    if (!file) return;
    byId("import-result").textContent = "Reading…";
    byId("import-result").textContent = await importFile(store, file);
    field.value = ""; // the same file may be chosen again
    imported();
  });
  byId("open-transfer").addEventListener("click", () => {
    const all = store.list().length;
    byId("all-json").disabled = byId("all-markdown").disabled = all === 0;
    byId("import-result").textContent = "";
    dialog.showModal();
  });
}
