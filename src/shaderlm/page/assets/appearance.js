// Light, dark, or as the system has it. A script of its own that runs before anything is drawn.

(() => {
  const KEY = "shaderlm.appearance";
  const root = document.documentElement;

  function read() {
    try { return localStorage.getItem(KEY) ?? "system"; } catch { return "system"; }
  }

  function show(choice) {
    if (choice === "light" || choice === "dark") root.dataset.scheme = choice;
    else delete root.dataset.scheme;
  }

  show(read());
  addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("appearance");
    select.value = root.dataset.scheme ?? "system";
    select.addEventListener("change", () => {
      show(select.value);
      try { localStorage.setItem(KEY, select.value); } catch { /* it lasts as long as the page */ }
    });
  });
})();
