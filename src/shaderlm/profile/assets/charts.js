// The charts in time: one step as two bars, one row per layer, and a few steps as lanes of host and GPU.

const HOST = {
  prepare: ["fill f-prepare s0", "choosing inputs, writing ids and positions"],
  take: ["fill f-take s2", "taking what another thread has recorded"],
  encode: ["fill f-encode s1", "recording the step's dispatches"],
  finish: ["fill f-finish s3", "closing the command buffer: validation by WebGPU"],
  submit: ["fill f-submit s1", "handing the command buffer to the driver"],
  wait: ["idle", "waiting for the GPU"],
};
const hostClass = (name) => (HOST[name] || ["fill f-other s1"])[0];
const hostTip = (name, us) => () => [name, [["time", duration(us)], ...(HOST[name] ? [["what", HOST[name][1]]] : [])]];

const WALLS_DIFFER = 0.1; // from here on, wall times of two runs deserve a remark

// One step ------------------------------------------------------------------------------------------------

// Segments one after the other: [{value, …}] with start and end.
function stacked(items) {
  let at = 0;
  return items.map((item) => ({ ...item, start: at, end: (at += item.value) }));
}

function gpuBar(figures, classes) {
  // Whatever the dispatches add up to, the bar shares the GPU time out in their proportions.
  const scale = figures.gpu === null || !figures.total ? 1 : figures.gpu / figures.total;
  const items = byTime(figures.kernels).map((group) => ({
    value: group.us * scale, classes: classes.get(group.name), label: group.name, kernel: group.name, lights: true,
    share: group.share, tip: () => kernelTip(group),
  }));
  const idle = figures.gpu === null ? 0 : figures.wall - figures.gpu;
  if (idle > 0) {
    const gap = figures.phase.gap_us ?? null;
    items.push({
      value: idle, classes: "idle", label: "idle",
      tip: () => ["GPU idle", [["wall − busy", duration(idle)], ["between steps, by timestamps", duration(gap)]]],
    });
  }
  return stacked(items);
}

function hostBar(phase) {
  const items = Object.entries(phase.host_us || {}).filter(([, us]) => us > 0)
    .map(([name, us]) => ({ value: us, classes: hostClass(name), label: name, tip: hostTip(name, us) }));
  return stacked(items);
}

function stepLead(figures) {
  const { phase, gpu, ideal, missing } = figures;
  const wall = `A step takes ${duration(phase.wall_us)}`;
  const roofs = ideal ? ` At the measured roofs the same work would take ${duration(ideal)}.` : "";
  if (gpu === null) {
    return `${wall}. ${missing}, so how long the GPU was busy is not known; the upper bar is the sum of the ` +
      `dispatches, timed one by one, and need not add up to the step.${roofs}`;
  }
  const differs = Math.abs(figures.wall / phase.wall_us - 1) > WALLS_DIFFER
    ? " The two runs differ: the machine had other work to do, or its clocks changed." : "";
  return `${wall}. In the run with timestamps it took ${duration(figures.wall)}, and the GPU worked for ` +
    `${duration(gpu)} of that (${percent(figures.busy)}).${differs}${roofs}`;
}

function drawStep(figures, classes, width) {
  const gpu = gpuBar(figures, classes);
  const host = hostBar(figures.phase);
  const end = (bar) => (bar.length ? bar[bar.length - 1].end : 0);
  const most = Math.max(end(gpu), end(host), figures.phase.wall_us) || 1;
  const draw = (bar) => bar.map((item) => segment({ ...item, most, width: trackWidth(width) }));
  const named = figures.gpu === null ? "Dispatches" : "GPU";
  byId("step").replaceChildren(
    ...heading("One step", stepLead(figures)),
    make("div", { class: "bars" }, gpu.length ? lane(named, draw(gpu), duration(end(gpu))) : "",
      host.length ? lane("Host", draw(host), duration(end(host))) : "", axis(most, trackWidth(width))),
    gpu.length ? make("p", { class: "legend-title" }, figures.gpu === null ? "Dispatches by kernel" : "GPU by kernel") : "",
    legend(gpu.map((item) => ({
      classes: item.classes, name: item.label, kernel: item.kernel, tip: item.tip,
      value: item.kernel === undefined ? duration(item.value) : `${duration(item.value)} · ${percent(item.share)}`,
    }))),
    host.length ? make("p", { class: "legend-title" }, "Host") : "",
    legend(host.map((item) => ({ classes: item.classes, name: item.label, value: duration(item.value), tip: item.tip }))),
  );
}

// Layers --------------------------------------------------------------------------------------------------

// A layer that is longer than the axis fills it, to a scale of its own and with a break in it.
function layerRow(layer, figures, classes, axisEnd, width) {
  const broken = layer.us > axisEnd;
  const most = broken ? layer.us : axisEnd;
  let at = 0;
  const segments = figures.dispatches.filter((d) => d.layer === layer.name).map((d) => segment({
    classes: classes.get(d.kernel), start: at, end: (at += d.us), most, width, kernel: d.kernel,
    tip: () => dispatchTip(d), data: { "data-dispatch": d.index, role: "img", "aria-label": `${d.layer} ${d.op} ${d.kernel} ${duration(d.us)}` },
  }));
  const grid = broken ? [] : gridlines(most, width);
  return lane(layer.name, [...grid, ...segments, ...(broken ? [make("div", { class: "break" })] : [])], duration(layer.us));
}

// One stop of the Tab key for the whole chart; the arrow keys walk through its dispatches.
function walkable(chart) {
  const rows = [...chart.querySelectorAll(".track")].map((track) => [...track.querySelectorAll("[data-dispatch]")]).filter((row) => row.length);
  let row = 0, column = 0;
  const go = () => {
    for (const node of chart.querySelectorAll(".on")) node.classList.remove("on");
    column = Math.max(0, Math.min(column, rows[row].length - 1));
    rows[row][column].classList.add("on");
    rows[row][column].scrollIntoView({ block: "nearest" });
    showTip(rows[row][column]);
  };
  const moves = {
    ArrowRight: () => { if (column + 1 < rows[row].length) column += 1; else if (row + 1 < rows.length) { row += 1; column = 0; } },
    ArrowLeft: () => { if (column > 0) column -= 1; else if (row > 0) { row -= 1; column = rows[row].length - 1; } },
    ArrowDown: () => { row = Math.min(row + 1, rows.length - 1); },
    ArrowUp: () => { row = Math.max(row - 1, 0); },
    Home: () => { row = column = 0; },
    End: () => { row = rows.length - 1; column = rows[row].length - 1; },
  };
  chart.addEventListener("keydown", (event) => {
    if (!moves[event.key] || !rows.length) return;
    event.preventDefault();
    moves[event.key]();
    go();
  });
  chart.addEventListener("focus", () => rows.length && chart.matches(":focus-visible") && go());
  chart.addEventListener("blur", () => chart.querySelectorAll(".on").forEach((node) => node.classList.remove("on")));
}

function drawLayers(figures, classes, width) {
  if (!figures.dispatches.length) {
    byId("layers").replaceChildren(...heading("Layers", "The run was cut short before its dispatches were timed."));
    return;
  }
  const most = layerEnd(figures.layers);
  const track = trackWidth(width);
  const chart = make("div", {
    class: "rows", tabindex: 0, role: "group",
    "aria-label": "Dispatches by layer; the arrow keys move from one to the next",
  }, ...figures.layers.map((layer) => layerRow(layer, figures, classes, most, track)));
  byId("layers").replaceChildren(
    ...heading("Layers", `The ${whole(figures.dispatches.length)} dispatches of a step in order, one row per layer, as wide as they take long.${
      figures.layers.some((layer) => layer.us > most) ? " A row with a break is longer than the axis and drawn to a scale of its own." : ""}`),
    legend(byTime(figures.kernels).map((g) => ({ classes: classes.get(g.name), name: g.name, kernel: g.name, tip: () => kernelTip(g) }))),
    chart, axis(most, track),
  );
  walkable(chart);
}

// Steps ---------------------------------------------------------------------------------------------------

// Where the host begins each step; steps that begin close together, because it runs ahead of the GPU, share a mark.
function stepMarks(steps, zero, most, width) {
  const groups = [];
  for (const [i, step] of steps.entries()) {
    if (!step.host || !step.host.length) continue;
    const [number, at] = [i + 1, step.host[0][1] - zero];
    const last = groups[groups.length - 1];
    if (last && ((at - last.at) / most) * width < 64) last.to = number;
    else groups.push({ at, from: number, to: number });
  }
  return groups.map(({ at, from, to }) => make("span", { class: "mark", style: { left: `${(100 * at) / most}%` } },
    from === to ? `step ${from}` : `steps ${from}–${to}`));
}

function drawSteps(figures, width) {
  const steps = figures.phase.timeline || [];
  const section = byId("steps");
  section.replaceChildren();
  if (!steps.length) return;
  const spans = steps.flatMap((step) => [...(step.host || []).map(([, start, end]) => [start, end]), ...(step.gpu ? [step.gpu] : [])]);
  const zero = Math.min(...spans.map(([start]) => start));
  const most = Math.max(...spans.map(([, end]) => end)) - zero || 1;
  const at = (start, end) => ({ start: start - zero, end: end - zero, most, width: trackWidth(width) });
  const hosts = steps.flatMap((step) => (step.host || []).map(([name, start, end]) =>
    segment({ ...at(start, end), classes: hostClass(name), label: name, tip: hostTip(name, end - start) })));
  const busy = steps.map((step, i) => step.gpu && segment({
    ...at(...step.gpu), classes: "fill f-linear", label: `step ${i + 1}`,
    tip: () => [`step ${i + 1}`, [["GPU busy", duration(step.gpu[1] - step.gpu[0])]]],
  })).filter(Boolean);
  const marks = stepMarks(steps, zero, most, trackWidth(width));
  section.append(
    ...heading("Steps", busy.length
      ? `${counted(steps.length, "step")} in the middle of the run: where the GPU's lane is empty, it waits for the host.`
      : `${counted(steps.length, "step")} in the middle of the run. Without GPU time there is no lane for the GPU.`),
    make("div", { class: "steps" }, lane("", marks, "", "marks"), lane("Host", hosts, ""),
      busy.length ? lane("GPU", busy, "") : "", axis(most, trackWidth(width))),
    legend([...new Set(steps.flatMap((step) => (step.host || []).map(([name]) => name)))].map((name) => ({ classes: hostClass(name), name }))),
  );
}
