// The page: head, headline figures, tables, the switch between phases, and what is drawn when.

const profile = JSON.parse(byId("profile").textContent);
const roofs = profile.roofline || null;

// Head ----------------------------------------------------------------------------------------------------

function dated(text) {
  const date = new Date(text);
  if (Number.isNaN(date.getTime())) return text;
  return `${date.toLocaleString("en-GB", { dateStyle: "long", timeStyle: "short", timeZone: "UTC" })} UTC`;
}

function drawHead() {
  document.title = `${profile.model} · shaderlm profile`;
  const line = (...parts) => make("p", { class: "meta" }, parts.filter(Boolean).join(" · "));
  byId("head").append(
    make("p", { class: "overline" }, "shaderlm profile"), make("h1", {}, profile.model),
    line(profile.device, profile.backend, profile.driver),
    line(profile.date && dated(profile.date), profile.package && `shaderlm ${profile.package}`,
      profile.commit && `commit ${profile.commit}`, profile.clock && `clock: ${profile.clock}`),
  );
  if (profile.command) byId("head").append(make("code", { class: "command" }, profile.command));
  if (profile.software && !(profile.notes || []).some((note) => note.includes("software adapter"))) {
    const warning = "This is a software adapter: it computes on the CPU. The times say nothing about GPUs.";
    byId("head").append(make("p", { class: "software" }, warning));
  }
  byId("notes").append(...(profile.notes || []).map((note) => make("li", {}, note)));
}

function headline(figures) {
  const { phase } = figures;
  const figure = (value, name) => make("div", { class: "figure" }, make("b", {}, value), make("div", { class: "soft" }, name));
  const rows = `${counted(phase.rows, "token")} a step`;
  const steps = counted(phase.steps, "step");
  const share = figures.bandwidth === null ? "" : `, ${percent(figures.bandwidth)} of the bandwidth`;
  const roofline = figures.gpu && figures.ideal ? (100 * figures.ideal) / figures.gpu : null;
  return make("div", { class: "figures", "data-phase": phase.name },
    make("div", {}, make("h2", {}, phase.name),
      make("div", { class: "soft" }, `${rows} at depth ${whole(phase.depth)}, mean of ${steps}`)),
    figure(sig(figures.rate), "tokens/s"),
    figure(percent(figures.busy), figures.busy === null ? "GPU busy: not measured" : "GPU busy"),
    figure(whole(figures.dispatches.length), "dispatches a step"),
    figure(sig(figures.gbs), `GB/s over the step${share}`),
    figure(percent(roofline), "of roofline while busy"));
}

// Tables --------------------------------------------------------------------------------------------------

// Name, key, and how a value is written. Of a time, the name with a unit: each column takes that of its largest value.
const COLUMNS = [
  ["calls", "calls", whole], [(unit) => `total ${unit}`, "us", null], ["share of GPU time", "share", percent], [(unit) => `${unit} per call`, "each", null],
  ["GB/s", "gbs", sig], ["GFLOP/s", "gflops", sig], ["% of roofline", "roof", percent], [(unit) => `${unit} above roof`, "above", null],
];

function columnsFor(groups, renamed) {
  return COLUMNS.map(([name, key, write]) => {
    if (write) return [renamed[key] || name, key, write];
    const unit = unitOf(Math.max(0, ...groups.map((group) => Math.abs(group[key] ?? 0))));
    return [name(unit.name), key, (value) => sig(Number.isFinite(value) ? value / unit.us : null)];
  });
}

function tableRow(group, columns, swatch) {
  const cells = columns.map(([, key, write]) => (key === "share"
    ? make("td", { class: "share", style: { "--share": Math.min(1, (group.share || 0) / 100) } }, write(group.share))
    : make("td", {}, write(group[key]))));
  return make("tr", { "data-name": group.name },
    make("td", { title: group.name }, swatch ? make("span", { class: `swatch ${swatch}` }) : null, group.name), ...cells);
}

// What was not measured goes last, whichever way the rest is sorted.
function compare(a, b, key, sign) {
  if (key === "name") return sign * a.name.localeCompare(b.name, "en", { numeric: true });
  const [x, y] = [a[key] ?? null, b[key] ?? null];
  if (x === null || y === null) return (x === null) - (y === null);
  return sign * (x - y);
}

function sortable(id, title, groups, classes, renamed = {}) {
  const body = make("tbody");
  const columns = columnsFor(groups, renamed);
  const rows = new Map(groups.map((group) => [group, tableRow(group, columns, classes && classes.get(group.name))]));
  const heads = [[title, "name"], ...columns].map(([name, key]) => {
    const button = make("button", { type: "button" }, name);
    const head = make("th", { scope: "col", "data-key": key }, button);
    // Names start from a, figures from the largest.
    const first = key === "name" ? 1 : -1;
    const last = () => ({ ascending: 1, descending: -1 })[head.getAttribute("aria-sort")];
    button.addEventListener("click", () => sort(key, last() ? -last() : first));
    return head;
  });
  function sort(key, sign) {
    for (const head of heads) {
      if (head.dataset.key === key) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    }
    body.replaceChildren(...[...groups].sort((a, b) => compare(a, b, key, sign)).map((group) => rows.get(group)));
  }
  body.append(...groups.map((group) => rows.get(group)));
  if (classes) sort("us", -1);
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table by ${title}` },
    make("table", { id }, make("thead", {}, make("tr", {}, ...heads)), body));
}

function drawTables(figures, classes) {
  const lead = figures.gpu === null ? "Times are per step, each dispatch timed by itself." : "Times are per step.";
  const renamed = figures.gpu === null ? { share: "share of time" } : {};
  byId("tables").replaceChildren();
  if (!figures.dispatches.length) return;
  byId("tables").replaceChildren(
    ...heading("Tables", `${lead} Click a column's head to sort by it.`),
    make("h3", {}, "By kernel"), sortable("by-kernel", "kernel", figures.kernels, classes, renamed),
    make("h3", {}, "By op"), sortable("by-op", "op", byTime(figures.ops), null, renamed),
    make("h3", {}, "By layer"), sortable("by-layer", "layer", figures.layers, null, renamed));
}

// How to read it ------------------------------------------------------------------------------------------

function timestampCost(figures) {
  if (figures.gpu === null) {
    return `${figures.missing}, so GPU busy and the gaps between steps are missing from this page. Dispatches that ` +
      "are timed by the wall clock each include a submission.";
  }
  const cost = roofs && Number.isFinite(roofs.timestamp_us) ? ` (${duration(roofs.timestamp_us)} each on this device)` : "";
  const costly = "Wall time was measured without timestamps, GPU time with two a step. A timestamp after every " +
    `dispatch takes time itself${cost}: with them the dispatches of a step took ${duration(figures.timestamped)} instead of ${duration(figures.gpu)}.`;
  const { scale } = figures.phase;
  if (!Number.isFinite(scale)) return `${costly} The layers and tables add up to ${duration(figures.total)}.`;
  return `${costly} That cost is taken off each, and what remains is scaled by ${sig(scale)} to add up to the GPU time ` +
    "without timestamps.";
}

function drawReading(figures) {
  const part = (title, text) => make("p", {}, make("b", {}, `${title} `), text);
  byId("reading").replaceChildren(
    make("h2", {}, "How to read this"),
    part("Time.", "A dispatch's time runs from the end of the one before it to its own end, so it includes its launch."),
    part("Timestamps.", timestampCost(figures)),
    part("Bytes and FLOP.", "Counted from the shapes, not measured: each byte that a dispatch reads or writes counts " +
      "once, however often it is loaded. GB = 10⁹ bytes."),
    part("Percent of roofline.", "The time that the measured bandwidth or the measured arithmetic allows at best (of " +
      "matrix units, where a kernel multiplies by them), whichever is longer, over the time it took; for a group the sums of both. More than 100 % means that data came " +
      "out of a cache."),
  );
}

// Drawing -------------------------------------------------------------------------------------------------

const phases = profile.phases.map((phase) => figuresOf(phase, roofs, profile.clock));
const classes = colours(profile.phases);
let shown = phases[0];
let drawnWidth = 0;

function drawCharts() {
  drawnWidth = Math.round(byId("headline").clientWidth);
  hideTip();
  drawStep(shown, classes, drawnWidth);
  drawRoofline(shown, roofs, classes, drawnWidth);
  drawLayers(shown, classes, drawnWidth);
  drawSteps(shown, drawnWidth);
}

function show(figures) {
  shown = figures;
  document.body.dataset.shown = figures.phase.name;
  drawCharts();
  drawTables(figures, classes);
  drawReading(figures);
}

function drawSwitch() {
  if (phases.length < 2) return;
  const choice = (figures, i) => {
    const input = make("input", { type: "radio", name: "phase", value: figures.phase.name });
    input.checked = i === 0;
    input.addEventListener("change", () => show(figures));
    return make("label", {}, input, figures.phase.name);
  };
  byId("switch").append(make("fieldset", { "aria-label": "Phase" }, ...phases.map(choice)));
}

drawHead();
byId("headline").append(...phases.map(headline));
drawSwitch();
if (phases.length) show(phases[0]);
startTips();
new ResizeObserver(() => {
  if (phases.length && Math.round(byId("headline").clientWidth) !== drawnWidth) requestAnimationFrame(drawCharts);
}).observe(byId("headline"));
