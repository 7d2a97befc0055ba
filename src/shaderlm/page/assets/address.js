// Says what to do where the page is opened as a file: browsers then load no modules. So it is none itself.

addEventListener("DOMContentLoaded", () => {
  if (location.protocol !== "file:") return;
  const show = (id, text) => { document.getElementById(id).textContent = text; };
  show("device", "Not loaded");
  show("panel-title", "This page needs a web server.");
  show("panel-text", "Browsers do not run it from a file. In its folder, run shaderlm serve --web . or python -m http.server,"
    + " and open the address that it prints.");
  for (const id of ["panel-bar", "panel-done"]) document.getElementById(id).hidden = true;
  document.getElementById("panel").hidden = false;
  document.getElementById("panel").dataset.kind = "bad";
  document.getElementById("server").dataset.state = "lost";
  document.getElementById("send").disabled = true;
});
