// From the profile to figures: groups, rates, percent of the roofline, and how numbers are written. Knows no DOM.

// Three significant digits, thousands with commas; a dash for what was not measured or does not apply.
function sig(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.01) return value.toExponential(1);
  const digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

const whole = (value) => (Number.isFinite(value) ? value.toLocaleString("en-US") : "–");
// "1 step", "2 steps".
const counted = (value, name) => `${whole(value)} ${name}${value === 1 ? "" : "s"}`;

// A unit stays on the line of its number: the spaces are no-break spaces. What is less than 100 % does not read as that.
function percent(value) {
  if (!Number.isFinite(value)) return "–";
  const almost = value > 99 && value < 100;
  return `${(almost ? Math.min(value, 99.9) : value).toFixed(value >= 9.95 && !almost ? 0 : 1)}\u00a0%`;
}

// Times come in µs and are written in the unit in which they are short. 999.5 µs would be rounded to 1,000 of them.
const UNITS = [{ name: "s", us: 1e6 }, { name: "ms", us: 1e3 }, { name: "µs", us: 1 }];
const unitOf = (us) => UNITS.find((unit) => Math.abs(us) >= unit.us * 0.9995) || UNITS[UNITS.length - 1];
const duration = (us) => (Number.isFinite(us) ? `${sig(us / unitOf(us).us)}\u00a0${unitOf(us).name}` : "–");

// 4.25e12 → "4.25 T": for axes and roofs, whose range is wide.
function si(value) {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= size * 0.9995) return `${Number((value / size).toPrecision(3))} ${prefix}`;
  }
  return `${Number(value.toPrecision(3))} `;
}

// µs that the measured roofs allow for this much work; null where no roofs were measured.
function idealUs(item, roofs) {
  if (!roofs) return null;
  const peak = item.matrix_units ? roofs.matrix_flops_per_second : roofs.flops_per_second;
  return 1e6 * Math.max(item.bytes / roofs.bytes_per_second, item.flops / peak);
}

// Rates of a dispatch or of a group. No bytes, no GB/s: zero would read as a measurement.
function rates(item) {
  const us = item.us > 0 ? item.us : null;
  return {
    gbs: us && item.bytes ? item.bytes / us / 1e3 : null,
    gflops: us && item.flops ? item.flops / us / 1e3 : null,
    roof: us && item.ideal ? (100 * item.ideal) / us : null,
    above: us && item.ideal ? us - item.ideal : null,
  };
}

// The dispatches summed by a name, in the order of first appearance.
function grouped(dispatches, nameOf, total) {
  const groups = new Map();
  for (const dispatch of dispatches) {
    const name = nameOf(dispatch);
    if (!groups.has(name)) groups.set(name, { name, calls: 0, us: 0, bytes: 0, flops: 0, ideal: 0, matrix_units: false });
    const group = groups.get(name);
    group.calls += 1;
    group.matrix_units ||= dispatch.matrix_units;
    for (const key of ["us", "bytes", "flops", "ideal"]) group[key] += dispatch[key] || 0;
  }
  const list = [...groups.values()];
  for (const group of list) {
    Object.assign(group, rates(group), { share: total > 0 ? (100 * group.us) / total : null, each: group.us / group.calls });
  }
  return list;
}

const byTime = (groups) => [...groups].sort((a, b) => b.us - a.us);

// All that the page shows of one phase.
function figuresOf(phase, roofs, clock) {
  const dispatches = phase.dispatches.map((d, index) => {
    const item = { ...d, index, us: d.us || 0, bytes: d.bytes || 0, flops: d.flops || 0 };
    item.ideal = idealUs(item, roofs) || 0;
    return Object.assign(item, rates(item));
  });
  const sum = (key) => dispatches.reduce((total, d) => total + d[key], 0);
  const total = sum("us");
  const bytes = sum("bytes");
  const group = (nameOf) => grouped(dispatches, nameOf, total);
  const gpu = phase.gpu_us ?? null;
  return {
    phase, dispatches, total, gpu, ideal: sum("ideal"),
    timestamped: phase.timestamped_us ?? total,
    // Why there is no GPU time, where there is none.
    missing: clock === "wall clock" ? "This device gave no timestamps" : "GPU time was not taken",
    kernels: group((d) => d.kernel), ops: group((d) => d.op), layers: group((d) => d.layer),
    rate: (phase.rows * 1e6) / phase.wall_us,
    // Of the run in which GPU time was taken: another run may have taken longer.
    wall: phase.traced_wall_us ?? phase.wall_us,
    busy: gpu === null ? null : Math.min(100, (100 * gpu) / (phase.traced_wall_us ?? phase.wall_us)),
    gbs: bytes ? bytes / phase.wall_us / 1e3 : null,
    bandwidth: roofs && bytes ? (100 * bytes) / (phase.wall_us * 1e-6) / roofs.bytes_per_second : null,
  };
}

// Kernel → classes of its colour. The hue comes from the name, so it is the same in every report; members of a
// family take their lightness in the order of their names, over all phases.
const FAMILIES = [
  ["attention", /attention|softmax/], ["norm", /norm/], ["rope", /rope|kv/], ["linear", /linear|matmul|gemv|gemm/],
  ["pointwise", /add|mul|silu|gelu|swiglu/], ["choice", /argmax|sample|adjust/], ["rows", /embedding|(take|round)_rows/],
];

function colours(phases) {
  const members = new Map();
  for (const name of [...new Set(phases.flatMap((p) => p.dispatches.map((d) => d.kernel)))].sort()) {
    const family = (FAMILIES.find(([, pattern]) => pattern.test(name)) || ["other"])[0];
    if (!members.has(family)) members.set(family, []);
    members.get(family).push(name);
  }
  const classes = new Map();
  for (const [family, names] of members) {
    names.forEach((name, i) => classes.set(name, `fill f-${family} s${i % 4}${i >= 4 ? " again" : ""}`));
  }
  return classes;
}

// Where the axis of the layers ends. One layer is often far longer than the others (the vocabulary of a small model):
// one that would leave them less than half of the axis does not count.
function layerEnd(layers) {
  const times = layers.map((layer) => layer.us).sort((a, b) => a - b);
  const usual = times[Math.floor(0.9 * (times.length - 1))];
  return Math.max(...times.filter((us) => us <= 2 * usual)) || 1;
}

// Round numbers from 0 to most, about count of them.
function ticks(most, count) {
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((s) => s * power >= rough) * power;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}
