// Small parts that every chart uses: elements, the tooltip, highlighting, lanes with segments. Text from the profile
// only ever becomes text nodes and attribute values.

const byId = (id) => document.getElementById(id);

function make(tag, props = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "circle", "text", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Tooltip -------------------------------------------------------------------------------------------------

const tips = new WeakMap(); // element → () => [title, [[name, value], …]]
let explained = null; // the element whose tooltip is open

function showTip(node) {
  explained = node;
  const [title, rows] = tips.get(node)();
  const tip = byId("tip");
  const list = rows.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  tip.replaceChildren(make("b", {}, title), make("dl", {}, ...list));
  tip.hidden = false;
  const box = node.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.max(8, Math.min(innerWidth - width - 8, box.left + box.width / 2 - width / 2));
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above >= 8 ? above : Math.min(innerHeight - height - 8, box.bottom + 8)}px`;
}

function hideTip() {
  explained = null;
  byId("tip").hidden = true;
}

// While the page scrolls, the tooltip follows its element out of sight.
function followTip() {
  if (!explained) return;
  const box = explained.getBoundingClientRect();
  if (explained.isConnected && box.bottom > 0 && box.top < innerHeight) showTip(explained);
  else hideTip();
}

// The nearest element around an event's target that has a tooltip.
function tipped(event) {
  let node = event.target;
  while (node instanceof Element && !tips.has(node)) node = node.parentNode;
  return node instanceof Element ? node : null;
}

// Everything of other kernels fades while one is pointed at; null lights all again.
function light(kernel) {
  for (const node of document.querySelectorAll("[data-kernel]")) {
    node.classList.toggle("dim", kernel !== null && node.dataset.kernel !== kernel);
  }
}

function pointAt(event) {
  const node = tipped(event);
  if (node) showTip(node);
  else hideTip();
  const lit = event.target instanceof Element && event.target.closest("[data-lights]");
  light(lit ? lit.dataset.kernel : null);
}

function startTips() {
  document.addEventListener("pointerover", pointAt);
  document.addEventListener("focusin", (event) => event.target.matches(":focus-visible") && pointAt(event));
  document.addEventListener("focusout", () => { hideTip(); light(null); });
  document.documentElement.addEventListener("pointerleave", () => { hideTip(); light(null); });
  document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
  addEventListener("scroll", followTip, { passive: true });
}

// What the tooltip of a dispatch or of a kernel says.
function rateRows(item) {
  return [
    ["GB/s", sig(item.gbs)], ["GFLOP/s", sig(item.gflops)], ["of roofline", percent(item.roof)],
  ];
}

function kernelTip(group) {
  return [group.name, [
    ["per step", duration(group.us)], ["share of GPU time", percent(group.share)],
    ["calls", whole(group.calls)], ["per call", duration(group.each)], ...rateRows(group),
  ]];
}

function dispatchTip(d) {
  return [d.kernel, [
    ["layer", d.layer], ["op", d.op], ["route", d.route], ["workgroups", whole(d.workgroups)],
    ["operands", (d.operands || []).join(", ") || "–"], ["time", duration(d.us)], ...rateRows(d),
  ]];
}

// Lanes ---------------------------------------------------------------------------------------------------

// A segment from start to end on a track that ends at most; its label only where it fits into the width in px.
function segment({ classes, start, end, most, label, width, kernel, lights, tip, data = {} }) {
  const share = (100 * (end - start)) / most;
  const node = make("div", {
    class: `seg ${classes}`, "data-kernel": kernel, "data-lights": lights ? "" : null, ...data,
    // A hair of paper between neighbours, but never nothing at all.
    style: { left: `${(100 * start) / most}%`, width: `max(1px, calc(${share}% - 1px))` },
  });
  if (label && (share / 100) * width > label.length * 7.6 + 14) node.append(make("span", {}, label));
  if (tip) tips.set(node, tip);
  return node;
}

function lane(name, segments, total, extra = "") {
  return make("div", { class: `lane ${extra}` },
    make("div", { class: "name", title: name }, name), make("div", { class: "track" }, ...segments),
    make("div", { class: "total" }, total));
}

const axisTicks = (most, width) => ticks(most, Math.max(2, Math.min(8, width / 72)));

function axis(most, width) {
  const marks = axisTicks(most, width);
  const unit = unitOf(most);
  return lane("", marks.map((value) => make("span", {
    class: "tick", style: { left: `${(100 * value) / most}%` },
  }, value === 0 ? `0 ${unit.name}` : Number((value / unit.us).toPrecision(6)).toLocaleString("en-US"))), "", "axis");
}

const gridlines = (most, width) => axisTicks(most, width)
  .map((value) => make("div", { class: "grid", style: { left: `${(100 * value) / most}%` } }));

// Width of the track in a chart as wide as this, by the columns of .lane in the style sheet.
const trackWidth = (width) => width - (innerWidth <= 760 ? 148 : 180);

function legend(items) {
  return make("ul", { class: "legend" }, ...items.map(({ classes, name, value, kernel, tip }) => {
    const item = make("li", { "data-kernel": kernel, "data-lights": kernel === undefined ? null : "" },
      make("span", { class: `swatch ${classes}` }), make("span", { class: "mono" }, name),
      value ? make("span", { class: "soft" }, value) : null);
    if (tip) tips.set(item, tip);
    return item;
  }));
}

const heading = (title, lead) => [make("h2", {}, title), make("p", { class: "lead" }, lead)];
