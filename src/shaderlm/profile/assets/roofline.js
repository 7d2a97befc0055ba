// The roofline: FLOP/s over FLOP per byte, both logarithmic, one dot per kernel under the roofs that were measured.

const LAUNCH_BOUND = 3; // a kernel below this many launches' time is mostly launch

// The arithmetic that the kernels of a phase use, the highest peak last.
function peaksOf(dots, roofs) {
  const peaks = [["arithmetic", roofs.flops_per_second]];
  if (dots.some((d) => d.matrix_units)) peaks.push(["matrix units", roofs.matrix_flops_per_second]);
  return peaks.sort((a, b) => a[1] - b[1]);
}

function roofScales(dots, roofs, width, height) {
  const peaks = peaksOf(dots, roofs);
  const highest = peaks[peaks.length - 1][1];
  const ridge = highest / roofs.bytes_per_second;
  const margin = { left: 64, right: 20, top: 32, bottom: 44 };
  const decade = (round, value) => round(Math.log10(value));
  const xs = [...dots.map((d) => d.x), ridge];
  const ys = [...dots.map((d) => d.y), ...peaks.map(([, peak]) => peak)];
  const x = [decade(Math.floor, Math.min(...xs) * 0.7), decade(Math.ceil, Math.max(...xs) * 4)];
  const y = [decade(Math.floor, Math.min(...ys) * 0.7), decade(Math.ceil, Math.max(...ys) * 1.5)];
  const place = (range, from, to) => (value) => from + ((Math.log10(value) - range[0]) / (range[1] - range[0])) * (to - from);
  return {
    x, y, peaks, ridge, margin, width, height,
    px: place(x, margin.left, width - margin.right), py: place(y, height - margin.bottom, margin.top),
  };
}

function roofAxes(s) {
  const nodes = [];
  const decades = ([from, to]) => Array.from({ length: to - from + 1 }, (_, i) => from + i);
  const bottom = s.height - s.margin.bottom;
  const right = s.width - s.margin.right;
  const sparse = (s.x[1] - s.x[0]) * 44 > right - s.margin.left ? 2 : 1;
  for (const power of decades(s.x)) {
    const at = s.px(10 ** power);
    nodes.push(make("line", { class: "gridline", x1: at, x2: at, y1: s.margin.top, y2: bottom }));
    const text = power < 0 ? (10 ** power).toFixed(-power) : si(10 ** power).replace(" ", "");
    if ((power - s.x[0]) % sparse === 0) nodes.push(make("text", { x: at, y: bottom + 17, "text-anchor": "middle" }, text));
  }
  for (const power of decades(s.y)) {
    const at = s.py(10 ** power);
    nodes.push(make("line", { class: "gridline", x1: s.margin.left, x2: right, y1: at, y2: at }));
    nodes.push(make("text", { x: s.margin.left - 8, y: at + 4, "text-anchor": "end" }, si(10 ** power)));
  }
  nodes.push(make("text", { x: right, y: bottom + 36, "text-anchor": "end" }, "FLOP per byte →"));
  nodes.push(make("text", { x: 0, y: 12 }, "↑ FLOP/s"));
  return nodes;
}

function roofLines(s, roofs) {
  const bandwidth = roofs.bytes_per_second;
  const highest = s.peaks[s.peaks.length - 1][1];
  const left = Math.max(10 ** s.x[0], 10 ** s.y[0] / bandwidth);
  const [x0, y0] = [s.px(left), s.py(left * bandwidth)];
  const [xr, yr] = [s.px(s.ridge), s.py(highest)];
  const end = s.width - s.margin.right;
  const bottom = s.height - s.margin.bottom;
  const slope = Math.atan2(yr - y0, xr - x0);
  const mid = [x0 + (xr - x0) * 0.32, y0 + (yr - y0) * 0.32];
  const roof = `M${x0} ${y0}L${xr} ${yr}L${end} ${yr}`;
  // Boxes along the roofs and their labels, where the names of dots may not go.
  s.taken = Array.from({ length: 60 }, (_, i) => [x0 + ((xr - x0) * i) / 59, y0 + ((yr - y0) * i) / 59])
    .map(([x, y]) => [x - 6, y - (Math.abs(x - mid[0]) < 80 ? 24 : 5), x + 6, y + 5]);
  const flats = s.peaks.map(([name, peak]) => ({ name, peak, x: s.px(peak / bandwidth), y: s.py(peak) }));
  for (const flat of flats) s.taken.push([flat.x, flat.y - 22, end, flat.y + 4]);
  return [
    make("path", { class: "under", d: `${roof}L${end} ${bottom}L${x0} ${bottom}Z` }),
    make("path", { class: "roof", d: roof }),
    ...flats.slice(0, -1).map((flat) => make("path", { class: "roof", d: `M${flat.x} ${flat.y}L${end} ${flat.y}` })),
    make("text", {
      class: "roof-label halo", "text-anchor": "middle",
      transform: `translate(${mid[0]} ${mid[1]}) rotate(${(slope * 180) / Math.PI}) translate(0 -8)`,
    }, `memory ${si(bandwidth)}B/s`),
    ...flats.map((flat) => make("text", { class: "roof-label halo", x: end, y: flat.y - 8, "text-anchor": "end" },
      `${flat.name} ${si(flat.peak)}FLOP/s`)),
  ];
}

// Labels for the dots that take the most time, where a place beside them is free; the tooltip names the others.
function dotLabels(dots, s) {
  const taken = [...s.taken];
  const inside = (box) => box[0] > s.margin.left && box[2] < s.width - 4 && box[1] > s.margin.top &&
    box[3] < s.height - s.margin.bottom;
  const meet = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
  // A name keeps away from other dots: it would be read as theirs.
  const near = (d, margin) => [d.cx - d.r - margin, d.cy - d.r, d.cx + d.r + margin, d.cy + d.r];
  const free = (box, own) => inside(box) && !taken.some((other) => meet(box, other)) &&
    !dots.some((d) => meet(box, near(d, Math.hypot(d.cx - own.cx, d.cy - own.cy) < own.r ? 0 : 14)));
  const nodes = [];
  for (const d of dots) {
    const w = d.name.length * 7.1, gap = d.r + 5;
    const [right, left] = [d.cx + gap, d.cx - gap - w];
    const spots = [
      [right, d.cy + 4], [left, d.cy + 4], [d.cx - w / 2, d.cy - gap - 2], [d.cx - w / 2, d.cy + gap + 10],
      [right + 8, d.cy - 4], [right + 8, d.cy + 12], [left - 8, d.cy - 4], [left - 8, d.cy + 12],
    ];
    const spot = spots.find(([x, y]) => free([x, y - 10, x + w, y + 3], d));
    if (!spot) continue;
    taken.push([spot[0], spot[1] - 10, spot[0] + w, spot[1] + 3]);
    nodes.push(make("text", { class: "dot-label halo", x: spot[0], y: spot[1], "data-kernel": d.name }, d.name));
  }
  return nodes;
}

function roofDots(dots, classes) {
  return dots.map((d) => {
    const node = make("circle", {
      class: `dot ${classes.get(d.name)}${d.hollow ? " hollow" : ""}`, cx: d.cx, cy: d.cy, r: d.r, tabindex: 0, role: "img",
      "data-kernel": d.name, "data-lights": "",
      "aria-label": `${d.name}: ${sig(d.x)} FLOP per byte, ${si(d.y)}FLOP/s, ${percent(d.roof)} of the roofline, ${percent(d.share)} of GPU time`,
    });
    tips.set(node, () => {
      const [title, rows] = kernelTip(d);
      return [title, [...rows, ["FLOP per byte", sig(d.x)], ...(d.hollow ? [["bound by", "launch"]] : [])]];
    });
    return node;
  });
}

function roofLegend(roofs, left_out) {
  const launch = Number.isFinite(roofs.dispatch_us);
  const items = [
    make("li", {}, make("span", { class: "key full" }), "a kernel; its area is its share of GPU time"),
    launch ? make("li", {}, make("span", { class: "key" }),
      `mean under ${LAUNCH_BOUND} × ${duration(roofs.dispatch_us)}, the cost of an empty dispatch: launch limits it, not a roof`) : null,
  ];
  const names = left_out.map((group) => group.name).join(", ");
  return [
    make("ul", { class: "legend" }, ...items.filter(Boolean)),
    left_out.length ? make("p", { class: "note" }, `Not drawn, for want of counted FLOP, bytes or time: ${names}.`) : "",
  ];
}

function drawRoofline(figures, roofs, classes, width) {
  const section = byId("roofline");
  const title = heading("Roofline", "How near each kernel comes to what this device was measured to do: on the slope " +
    "memory limits, on the flat arithmetic.");
  const drawn = roofs ? byTime(figures.kernels).filter((g) => g.flops > 0 && g.bytes > 0 && g.us > 0) : [];
  if (!drawn.length) {
    const why = roofs ? "no kernel of this phase has counted FLOP, bytes and time" : "the profile has no measured roofs";
    section.replaceChildren(...title, make("p", { class: "note" }, `No plot: ${why}.`));
    return;
  }
  const height = Math.round(Math.max(320, Math.min(460, width * 0.5)));
  const dots = drawn.map((g) => ({
    ...g, x: g.flops / g.bytes, y: (g.flops / g.us) * 1e6, hollow: g.each < LAUNCH_BOUND * roofs.dispatch_us,
  }));
  const scales = roofScales(dots, roofs, width, height);
  const largest = width < 600 ? 16 : 24;
  for (const d of dots) {
    // Area by share; the smallest stay large enough to be pointed at.
    Object.assign(d, { cx: scales.px(d.x), cy: scales.py(d.y), r: Math.max(4, largest * Math.sqrt(d.us / dots[0].us)) });
  }
  section.replaceChildren(
    ...title,
    make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Roofline plot" },
      ...roofAxes(scales), ...roofLines(scales, roofs), ...roofDots(dots, classes), ...dotLabels(dots, scales)),
    ...roofLegend(roofs, figures.kernels.filter((group) => !drawn.includes(group))),
  );
}
