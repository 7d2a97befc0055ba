// Pictures for shaderlm.js, which loads this file when the first one comes. docs/web.md describes what it reads of
// plan.json: "vision", and "pixels" and "towers" of a variant.
// In this file: pixels, what a processor makes of sizes, numbers of ops, the tower, and pictures in prompts.

const MOST_BYTES = 32 << 20; // of a file
const MOST_PIXELS = 50_000_000;
const MOST_PICTURES = 64; // of a conversation
const FEATURE_BYTES = 256 << 20; // of features that are kept for pictures that are asked about again
const BAND_BYTES = 64 << 20; // of pixels that are on the device at once
const DISPATCHES = 48; // of a tower that are submitted at a time
const RECORD = 8; // words of a record of image_rows, and the places of two of them
const [REACH, FEATURE] = [3, 4];
const MAP_READ_COPY_DST = 9;

// Pixels ------------------------------------------------------------------------------------------------------

const hashOf = async (bytes) => {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
};

/** RGBA of some rows of an image, on white. */
function drawn(image, top, rows) {
  const canvas = new OffscreenCanvas(image.width, rows);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, image.width, rows);
  context.drawImage(image, 0, -top);
  return context.getImageData(0, 0, image.width, rows).data;
}

/** A picture whose size is known. `rgba(top, rows)` gives its pixels, until `forget`. */
class Picture {
  constructor(key, { width, height }, rgba, forget = () => {}) {
    Object.assign(this, { key, width, height, rgba, forget });
  }

  /** RGB of some rows, a byte each, and zeros up to whole words. Transparent parts are white. */
  rows(top, count) {
    const data = this.rgba(top, count);
    const pixels = new Uint8Array(4 * Math.ceil((3 * this.width * count) / 4));
    for (let i = 0, at = 0; i < data.length; i += 4) {
      const alpha = data[i + 3];
      const white = 255 * (255 - alpha) + 127;
      for (let c = 0; c < 3; c++) pixels[at++] = alpha === 255 ? data[i + c] : Math.trunc((data[i + c] * alpha + white) / 255);
    }
    return pixels;
  }
}

/** The bytes of a data URL. */
function bytesOfDataUrl(url, refuse) {
  const [, encoded] = /^data:[^,]*;base64,(.*)$/is.exec(url) ?? [];
  if (encoded === undefined) throw refuse("a data URL of a picture must begin with data:image/TYPE;base64,");
  try {
    return new Blob([Uint8Array.from(atob(encoded), (char) => char.charCodeAt(0))]);
  } catch {
    throw refuse("the data URL of a picture is not valid base64");
  }
}

/** The file at an address of the page's own origin. */
async function fetched(address, refuse) {
  if (/^data:/i.test(address)) return bytesOfDataUrl(address, refuse);
  const base = globalThis.location?.href;
  const url = URL.canParse(address, base) ? new URL(address, base) : null;
  const isOwn = url && (url.protocol === "blob:" || url.origin === globalThis.location?.origin);
  const shown = address.slice(0, 100);
  if (!isOwn) throw refuse(`pictures are read from the page's own origin alone, and from data URLs; got ${shown}`);
  const response = await fetch(url).catch(({ message }) => ({ statusText: message }));
  if (!response.ok) throw refuse(`cannot get the picture ${shown}: ${response.status ?? ""} ${response.statusText}`);
  return response.blob();
}

// Sizes -------------------------------------------------------------------------------------------------------

/** To the nearest whole number, halves to even ones. */
function nearest(number) {
  const low = Math.floor(number);
  return number - low === 0.5 ? low + (low % 2) : Math.round(number);
}

const upToEven = (number) => number + (number % 2);

function areaSize({ patch, merge, least_pixels: least, most_pixels: most }, rows, columns, refuse) {
  const unit = patch * merge;
  if (Math.max(rows, columns) > 200 * Math.min(rows, columns)) {
    throw refuse(`the longer side of a picture may be 200 times the shorter one, got ${columns} × ${rows}`);
  }
  const size = [rows, columns].map((side) => nearest(side / unit) * unit);
  const pixels = size[0] * size[1];
  if (pixels > most) {
    const ratio = Math.sqrt((rows * columns) / most);
    return [rows, columns].map((side) => Math.max(unit, Math.floor(side / ratio / unit) * unit));
  }
  if (pixels >= least) return size;
  const ratio = Math.sqrt(least / (rows * columns));
  return [rows, columns].map((side) => Math.ceil((side * ratio) / unit) * unit);
}

/** The longer side is `longest` at most; both are whole tokens. */
function boundedSize({ patch, merge, longest }, rows, columns) {
  const unit = patch * merge;
  const ratio = Math.max(rows, columns) / longest;
  const size = ratio > 1 ? [rows, columns].map((side) => Math.floor(side / ratio)) : [rows, columns];
  return size.map((side) => Math.max(1, Math.ceil(side / unit)) * unit);
}

// How pictures are resized, but for those that are cut into tiles.
const SIZES = {
  square: ({ side }) => [side, side],
  area: areaSize,
  longest: boundedSize,
};

/** The longer side is `longest`, the other one follows the shape, and is even. */
function longestSize(longest, shape, isWide, even) {
  const size = isWide ? [even(Math.trunc(longest / shape)), longest] : [longest, even(Math.trunc(longest * shape))];
  return size.map((side) => Math.max(side, 1));
}

function tilesLayout({ side, longest }, rows, columns) {
  let first = longestSize(longest, columns / rows, columns >= rows, upToEven);
  if (Math.max(...first) > 4096) first = longestSize(4096, first[1] / first[0], first[1] >= first[0], (number) => number);
  const shape = first[1] / first[0];
  const whole = (number) => Math.ceil(number / side) * side;
  let second;
  if (first[1] >= first[0]) {
    const width = whole(first[1]);
    second = [whole(Math.trunc(width / shape)), width];
  } else {
    const height = whole(first[0]);
    second = [height, whole(Math.trunc(height * shape))];
  }
  second = second.map((number) => Math.max(number, side));
  const tile = (stage, top, left) => ({ stage, top, left, rows: side, columns: side });
  if (Math.max(...second) <= side) return { sizes: [first, [side, side]], tiles: [tile(1, 0, 0)], tileGrid: [0, 0] };
  const tileGrid = second.map((number) => number / side);
  const tiles = [];
  for (let i = 0; i < tileGrid[0]; i++) for (let j = 0; j < tileGrid[1]; j++) tiles.push(tile(1, i * side, j * side));
  return { sizes: [first, second, [side, side]], tiles: [...tiles, tile(2, 0, 0)], tileGrid };
}

/** What becomes of a picture of some size: what it is resized to, one after the other, and the tiles of these. */
export function layoutOf(processor, width, height, refuse) {
  if (processor.sizing === "tiles") return tilesLayout(processor, height, width);
  const [rows, columns] = SIZES[processor.sizing](processor, height, width, refuse);
  return { sizes: [[rows, columns]], tiles: [{ stage: 0, top: 0, left: 0, rows, columns }], tileGrid: [0, 0] };
}

const patchesOf = ({ patch }, tile) => (tile.rows * tile.columns) / patch ** 2;
const tokensOf = (processor, tile) => patchesOf(processor, tile) / processor.merge ** 2;

/** What a picture is in the text of a prompt, in place of the placeholder. */
export function textOf(processor, { tiles, tileGrid: [rows, columns] }) {
  const { token, texts, sizing, patch, merge } = processor;
  const each = token.repeat(tokensOf(processor, tiles.at(-1)));
  if (texts.row_end) { // each row of tokens but the last ends with a token
    const [{ rows: height, columns: width }] = tiles;
    const row = token.repeat(width / (patch * merge));
    return Array(height / (patch * merge)).fill(row).join(texts.row_end) + (texts.end ?? "");
  }
  if (sizing !== "tiles") return (texts.begin ?? "") + each + (texts.end ?? "");
  let parts = "";
  for (let i = 1; i <= rows; i++) {
    for (let j = 1; j <= columns; j++) parts += `${texts.around}<row_${i}_col_${j}>${each}`;
    parts += "\n";
  }
  return `${parts}${rows ? "\n" : ""}${texts.around}${texts.whole}${each}${texts.around}`;
}

// Numbers of ops ----------------------------------------------------------------------------------------------

const sinc = (x) => (x ? Math.sin(Math.PI * x) / (Math.PI * x) : 1);

function cubic(distance) {
  const x = Math.abs(distance);
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
}

// A filter, and how far it reaches.
const FILTERS = {
  bilinear: [(x) => Math.max(0, 1 - Math.abs(x)), 1],
  bicubic: [cubic, 2],
  lanczos: [(x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0), 3],
};

/** The first input and the weights of every output of an axis, as graph/vision.py has them: sums of them are exact. */
export function resizeWeights(size, to, kind) {
  const [filter, reach] = FILTERS[kind];
  const step = size / to;
  const scale = Math.max(1, step);
  const first = new Uint32Array(to);
  const rows = Array.from(first, (_, i) => {
    const centre = (i + 0.5) * step;
    first[i] = Math.max(0, Math.trunc(centre - reach * scale + 0.5));
    const count = Math.min(Math.trunc(centre + reach * scale + 0.5), size) - first[i];
    const row = Array.from({ length: count }, (_, j) => filter((first[i] + j + 0.5 - centre) / scale));
    const sum = row.reduce((all, weight) => all + weight, 0);
    return row.map((weight) => weight / sum);
  });
  const taps = rows.reduce((most, row) => Math.max(most, row.length), 1);
  const most = rows.reduce((found, row) => row.reduce((a, b) => Math.max(a, b), found), 0);
  let precision = 0;
  while (precision < 22 && Math.trunc(0.5 + most * 2 ** (precision + 1)) < 1 << 15) precision++;
  const unit = 2 ** precision;
  const weights = new Float32Array(to * taps);
  rows.forEach((row, i) => row.forEach((weight, j) => (weights[i * taps + j] = Math.trunc(weight * unit + (weight < 0 ? -0.5 : 0.5)) / unit)));
  return { first, weights, taps };
}

/** Row and column of every patch of a tile: in the order of tokens, and of rows within a token. */
function* placesOf({ patch, merge }, tile) {
  for (let i = 0; i < tile.rows / patch; i += merge)
    for (let j = 0; j < tile.columns / patch; j += merge)
      for (let y = 0; y < merge; y++) for (let x = 0; x < merge; x++) yield [i + y, j + x];
}

/** Two rows of an axis between which a place lies, and their factors. */
function between(place, size, side) {
  const at = place * (size > 1 ? (side - 1) / (size - 1) : 0);
  const low = Math.min(Math.floor(at), side - 1);
  return [[low, 1 - (at - low)], [Math.min(low + 1, side - 1), at - low]];
}

/** What a tower reads beside patches, for one tile, with rows without a span up to `count`; and the tile's corners. */
export function tileInputs(about, tile, width, count) {
  const { processor, position_side: side, positions, rotary, rotary_offset: offset, theta } = about;
  const interpolated = positions === "interpolated";
  const { patch } = processor;
  const patches = patchesOf(processor, tile);
  const taps = interpolated ? 4 : 1;
  const inputs = { spans: new Uint32Array(2 * count).fill(patches) };
  if (positions) {
    inputs.places = new Uint32Array(count * taps);
    inputs.place_factors = new Float32Array(count * taps);
  }
  if (rotary) inputs.turns = new Float32Array(count * rotary);
  const corners = new Uint32Array(2 * patches);
  let n = 0;
  for (const [row, column] of placesOf(processor, tile)) {
    corners.set([3 * ((tile.top + row * patch) * width + tile.left + column * patch), 3 * width], 2 * n);
    inputs.spans[2 * n] = 0;
    if (interpolated) {
      let at = taps * n;
      for (const [i, a] of between(row, tile.rows / patch, side))
        for (const [j, b] of between(column, tile.columns / patch, side)) {
          inputs.places[at] = i * side + j;
          inputs.place_factors[at++] = a * b;
        }
    } else if (positions) {
      inputs.places[n] = row * side + column;
      inputs.place_factors[n] = 1;
    }
    for (let k = 0; k < rotary / 2; k++) {
      const quarter = rotary / 4;
      const angle = k < quarter ? row * theta ** (-k / quarter) : column * theta ** (-(k - quarter + offset) / quarter);
      inputs.turns.set([Math.cos(angle), Math.sin(angle)], rotary * n + 2 * k);
    }
    n++;
  }
  return { inputs, corners };
}

// The tower ---------------------------------------------------------------------------------------------------

/** Runs a tower on the device of a runner: pixels in, features out. One picture at a time. */
class Tower {
  constructor(runner, refuse) {
    Object.assign(this, { runner, refuse, about: runner.plan.vision, variant: runner.variant });
    this.plan = null; // the one that has buffers
    this.made = []; // buffers of the picture that is read
  }

  /** Features of a picture, [tokens, levels · out], or null if `signal` ends that. */
  async encode(picture, layout, signal, report) {
    const { processor, out, levels } = this.about;
    const width = out * levels;
    const features = new Float32Array(layout.tiles.reduce((sum, tile) => sum + tokensOf(processor, tile), 0) * width);
    try {
      const stages = await this.#resized(picture, layout);
      let at = 0;
      for (const tile of layout.tiles) {
        if (signal?.aborted) return null;
        const [, columns] = layout.sizes[tile.stage];
        const tokens = tokensOf(processor, tile);
        await this.#tile(tile, columns, stages[tile.stage], features.subarray(at, (at += tokens * width)), report);
      }
      return features;
    } finally {
      for (const buffer of this.made.splice(0)) buffer.destroy(); // after what was submitted
    }
  }

  /** A buffer for this picture, with these numbers in it. */
  async #buffer(content) {
    const bytes = content.byteLength ?? content;
    if (bytes > this.runner.device.limits.maxStorageBufferBindingSize) {
      throw this.refuse(`the picture takes ${(bytes / 1e6).toFixed(0)} MB in one piece, which this device does not bind; make it smaller`);
    }
    const [buffer] = await this.runner.allocate([bytes], "a picture");
    this.made.push(buffer);
    if (content.byteLength) this.runner.queue.writeBuffer(buffer, 0, content);
    return buffer;
  }

  /** One dispatch of a shader that has a thread for each of so many values. */
  async #run(op, count, buffers, params) {
    const [hash, threads] = this.variant.pixels[op];
    const groups = Math.ceil(count / threads);
    const x = Math.min(groups, 65535);
    const words = await this.#buffer(Uint32Array.from(params));
    const { pipeline, layout } = await this.runner.orFailure(this.runner.pipeline(hash));
    const group = this.#group(layout, [...buffers, { buffer: words }]);
    this.runner.submit([[{ pipeline, group, x, y: Math.ceil(groups / x), z: 1 }]], false);
  }

  #group({ group: layout }, resources) {
    const entries = resources.map((resource, binding) => ({ binding, resource }));
    return this.runner.device.createBindGroup({ layout, entries });
  }

  /** One axis of [outer, size, inner]; `first` and `weights` are those of its outputs. */
  async #axis(x, out, [outer, size, inner], { first, weights, taps }, op = "resize") {
    const to = first.length;
    const tables = [{ buffer: await this.#buffer(first) }, { buffer: await this.#buffer(weights) }];
    const count = outer * to * inner;
    await this.#run(op, count, [x, ...tables, out], [count, size, inner, to, taps]);
  }

  /** The buffers of all stages. */
  async #resized(picture, { sizes }) {
    const stages = [await this.#fromPixels(picture, sizes[0])];
    for (let i = 1; i < sizes.length; i++) {
      stages.push(await this.#fromStage(stages[i - 1], sizes[i - 1], sizes[i]));
    }
    return stages;
  }

  #tables([rows, columns], [height, width]) {
    const { filter } = this.about.processor;
    const of = (size, to) => (size === to ? null : resizeWeights(size, to, filter));
    return { down: of(rows, height), across: of(columns, width) };
  }

  async #fromStage(buffer, size, to) {
    const { down, across } = this.#tables(size, to);
    let found = buffer;
    for (const [table, shape, bytes] of [
      [across, [size[0], size[1], 3], 12 * size[0] * to[1]],
      [down, [1, size[0], 3 * to[1]], 12 * to[0] * to[1]],
    ]) {
      if (!table) continue;
      const out = await this.#buffer(bytes);
      await this.#axis({ buffer: found }, { buffer: out }, shape, table);
      found = out;
    }
    return found;
  }

  /** The first stage, some rows at a time: all pixels of a large picture would not fit one binding. */
  async #fromPixels(picture, [height, width]) {
    const [rows, columns] = [picture.height, picture.width];
    const { down, ...tables } = this.#tables([rows, columns], [height, width]);
    // The first axis makes numbers of bytes, whether its size changes or not.
    const across = tables.across ?? (down ? null : resizeWeights(width, width, this.about.processor.filter));
    const result = await this.#buffer(12 * height * width);
    // Where a binding begins must be a multiple of 256 bytes.
    let unit = 1;
    while ((12 * width * unit) % 256) unit *= 2;
    const read = (a, b) => (down ? [down.first[a], Math.min(rows, down.first[b - 1] + down.taps)] : [a, b]);
    const bytes = ([begin, end]) => Math.max(3 * columns, 12 * width) * (end - begin); // of pixels, and of resized rows
    for (let a = 0, b; a < height; a = b) {
      b = Math.min(height, a + unit);
      while (b < height && bytes(read(a, Math.min(height, b + unit))) <= BAND_BYTES) b = Math.min(height, b + unit);
      const [begin, end] = read(a, b);
      const kept = this.made.length;
      const out = { buffer: result, offset: 12 * width * a, size: 12 * width * (b - a) };
      let x = { buffer: await this.#buffer(picture.rows(begin, end - begin)) };
      if (across) {
        const shape = [end - begin, columns, 3];
        const middle = down ? { buffer: await this.#buffer(12 * width * (end - begin)) } : out;
        await this.#axis(x, middle, shape, across, "resize_bytes");
        x = middle;
      }
      if (down) {
        const { taps } = down;
        const part = { first: down.first.slice(a, b).map((at) => at - begin), weights: down.weights.slice(a * taps, b * taps), taps };
        await this.#axis(x, out, [1, end - begin, 3 * width], part, across ? "resize" : "resize_bytes");
      }
      for (const buffer of this.made.splice(kept)) buffer.destroy();
    }
    return result;
  }

  /** Features of a tile into an array. */
  async #tile(tile, width, stage, features, report) {
    const { about, runner } = this;
    const { processor, patch_width: patchWidth, out, levels } = about;
    const { patch, mean, std } = processor;
    const patches = patchesOf(processor, tile);
    const plan = this.variant.towers.find((each) => each.patches >= patches);
    if (!plan) throw this.refuse(`the picture has ${patches} patches, this export takes ${this.variant.towers.at(-1).patches} at most`);
    await this.#bind(plan, report);
    const { inputs, corners } = tileInputs(about, tile, width, plan.patches);
    for (const [name, words] of Object.entries(inputs)) runner.queue.writeBuffer(this.own.get(name).buffer, 0, words);
    const factors = Float32Array.from([...std.map((each) => 1 / (255 * each)), ...mean.map((each, i) => -each / std[i])]);
    const read = [stage, await this.#buffer(corners), await this.#buffer(factors)].map((buffer) => ({ buffer }));
    const count = patches * patchWidth;
    await this.#run("patches", count, [...read, this.own.get("patches")], [patches, patch, patchWidth]);
    runner.submit([this.steps], false, { most: DISPATCHES });
    const tokens = tokensOf(processor, tile);
    for (let level = 0; level < levels; level++) {
      const found = await this.#read(this.own.get(level ? `features.${level}` : "features").buffer, tokens * out);
      for (let t = 0; t < tokens; t++) features.set(found.subarray(t * out, (t + 1) * out), (t * levels + level) * out);
    }
  }

  /** Give a plan its buffers; that before has them no longer. Its weights are the runner's. */
  async #bind(plan, report) {
    if (this.plan === plan) return;
    for (const { buffer } of this.own?.values() ?? []) buffer.destroy();
    this.plan = null;
    const { runner } = this;
    await runner.orFailure(runner.compile([plan], (done, total) => report({ stage: "compile", done, total })));
    const sizes = plan.buffers.map(([, role, content]) => (role === "params" ? 4 * content.length : content));
    const buffers = (await runner.allocate(sizes, "reading pictures")).map((buffer) => ({ buffer }));
    this.own = new Map(plan.buffers.map(([name], i) => [name, buffers[i]]));
    plan.buffers.forEach(([, role, content], i) => {
      if (role === "params") runner.queue.writeBuffer(buffers[i].buffer, 0, Uint32Array.from(content));
    });
    const all = [...runner.buffers, ...buffers];
    this.steps = [];
    for (const [hash, x, y, z, ...numbers] of plan.dispatches) {
      const { pipeline, layout } = await runner.pipeline(hash);
      this.steps.push({ pipeline, group: this.#group(layout, numbers.map((number) => all[number])), x, y, z });
    }
    this.plan = plan;
  }

  async #read(buffer, count) {
    const { device, queue } = this.runner;
    const found = device.createBuffer({ size: 4 * count, usage: MAP_READ_COPY_DST });
    const encoder = device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, 0, found, 0, 4 * count);
    queue.submit([encoder.finish()]);
    await this.runner.orFailure(found.mapAsync(1));
    const copy = new Float32Array(found.getMappedRange()).slice();
    found.destroy();
    return copy;
  }
}

// Pictures in prompts -----------------------------------------------------------------------------------------

/** The pictures of a prompt: what steps read of their rows. */
class PromptImages {
  constructor(about, ids, images) {
    const length = ids.length;
    Object.assign(this, { images, width: about.out * about.levels, shift: 0, blocks: [] });
    this.keys = [...ids]; // what is compared with the cache
    this.records = new Int32Array(RECORD * length);
    this.marked = new Uint8Array(length); // rows with a record that is not 0
    for (const { picture, positions, grid } of images) this.#place(about, picture, positions, grid);
  }

  #place({ several_axes: hasAxes, sees_itself: seesItself }, { key }, positions, [rows, columns]) {
    const [first, end] = [positions[0], positions.at(-1) + 1];
    positions.forEach((at, i) => {
      this.keys[at] = `${key} ${i}`;
      this.marked[at] = 1;
      if (seesItself) this.records[RECORD * at + REACH] = end - 1 - at;
      const begin = first + this.shift - at;
      const places = [begin, begin + Math.floor(i / columns), begin + (i % columns)];
      if (hasAxes) this.records.set(places, RECORD * at);
    });
    if (seesItself) this.blocks.push([first, end]);
    if (!hasAxes) return;
    this.shift += Math.max(rows, columns) - positions.length;
    for (let at = end; at < this.marked.length; at++) {
      this.records.fill(this.shift, RECORD * at, RECORD * at + 3);
      this.marked[at] = this.shift ? 1 : 0;
    }
  }

  /** What was decoded is of no use. */
  forget() {
    for (const { picture } of this.images) picture.forget();
  }

  /** Is there anything of an image about these rows? */
  marks(position, rows) {
    return this.marked.subarray(position, position + rows).includes(1);
  }

  /** Where a prompt may begin, no later than here: rows that see each other are in one step. */
  begin(position) {
    return this.blocks.find(([begin, end]) => begin < position && position < end)?.[0] ?? position;
  }

  /** So many rows, or as many as cut no image whose rows see each other. */
  whole(position, rows) {
    const block = this.blocks.find(([begin, end]) => begin < position + rows && position + rows < end);
    if (!block) return rows;
    return (block[0] > position ? block[0] : block[1]) - position;
  }

  /** What the rows of a step read. */
  write(runner, position, rows) {
    const records = this.records.slice(RECORD * position, RECORD * (position + rows));
    let number = 0;
    for (const { picture, positions } of this.images) {
      const low = positions.findIndex((at) => at >= position);
      const high = positions.findLastIndex((at) => at < position + rows) + 1;
      if (low < 0 || high <= low) continue;
      for (let i = low; i < high; i++) records[RECORD * (positions[i] - position) + FEATURE] = ++number;
      const part = picture.features.subarray(low * this.width, high * this.width);
      runner.queue.writeBuffer(runner.buffer("features"), 4 * this.width * (number - (high - low)), part);
    }
    runner.write("image_rows", records);
  }
}

/** The pictures of one model: what they are in prompts, and their features. */
export class Vision {
  /** refuse: makes the error of a wrong argument. */
  constructor(runner, refuse) {
    Object.assign(this, { refuse, about: runner.plan.vision, tower: new Tower(runner, refuse) });
    this.known = new Map(); // key → picture with features, the longest unused first
  }

  layout({ width, height }) {
    return layoutOf(this.about.processor, width, height, this.refuse);
  }

  /** Messages with { type: "image" } in place of pictures, and these in order. */
  async read(messages) {
    const pictures = [];
    const read = async (part) => {
      if (part?.type === "text" && typeof part.text === "string") return { type: "text", text: part.text };
      const source = part?.type === "image" ? part.image : part?.type === "image_url" ? (part.image_url?.url ?? part.image_url) : undefined;
      if (source === undefined || source === null) {
        const expected = '{ type: "text", text }, { type: "image", image } or { type: "image_url", image_url: { url } }';
        throw this.refuse(`a part of a message must be ${expected}`);
      }
      if (pictures.length === MOST_PICTURES) throw this.refuse(`a conversation may have ${MOST_PICTURES} pictures`);
      pictures.push(await this.#picture(source));
      return { type: "image" };
    };
    const plain = [];
    for (const message of messages) {
      const { content } = message;
      if (!Array.isArray(content)) {
        plain.push(message);
        continue;
      }
      const parts = [];
      for (const part of content) parts.push(await read(part));
      plain.push({ ...message, content: parts });
    }
    return { plain, pictures };
  }

  /** A picture of whatever there is: a file, a bitmap, pixels or an address. */
  async #picture(source) {
    const file = typeof source === "string" || source instanceof URL ? await fetched(String(source), this.refuse) : source;
    if (globalThis.Blob && file instanceof Blob) return this.#ofFile(file);
    const { width, height } = file;
    if (!(width > 0 && height > 0)) {
      throw this.refuse("a picture must be a File, a Blob, an ImageBitmap, { width, height, data } with RGBA, or an address");
    }
    this.#checkSize(width, height);
    const isBitmap = globalThis.ImageBitmap && file instanceof ImageBitmap;
    const data = isBitmap ? drawn(file, 0, height) : file.data;
    if (!(data?.BYTES_PER_ELEMENT === 1 && data.length === 4 * width * height)) {
      throw this.refuse(`the data of a picture of ${width} × ${height} must be ${4 * width * height} bytes, RGBA`);
    }
    const key = `${width}×${height} ${await hashOf(data)}`;
    const copy = data.slice(); // the caller may change it
    return this.#knownAs(key) ?? new Picture(key, file, (top, rows) => copy.subarray(4 * width * top, 4 * width * (top + rows)));
  }

  #knownAs(key) {
    const picture = this.known.get(key);
    if (picture && this.known.delete(key)) this.known.set(key, picture); // used last
    return picture;
  }

  async #ofFile(blob) {
    if (!blob.size) throw this.refuse("the picture is empty: it has 0 bytes");
    if (blob.size > MOST_BYTES) throw this.refuse(`a picture may have 32 MiB, this one has ${(blob.size / 2 ** 20).toFixed(1)} MiB`);
    if (!globalThis.createImageBitmap) throw this.refuse("files of pictures are decoded in browsers alone; give { width, height, data } with RGBA");
    const key = await hashOf(await blob.arrayBuffer());
    const known = this.#knownAs(key);
    if (known) return known;
    const options = { imageOrientation: "from-image", colorSpaceConversion: "none" };
    const bitmap = await createImageBitmap(blob, options).catch(() => {
      throw this.refuse("the picture cannot be decoded: it is damaged, too large, or of a kind that this browser does not know");
    });
    try {
      this.#checkSize(bitmap.width, bitmap.height);
    } catch (problem) {
      bitmap.close();
      throw problem;
    }
    return new Picture(key, bitmap, (top, rows) => drawn(bitmap, top, rows), () => bitmap.close());
  }

  #checkSize(width, height) {
    if (width * height <= MOST_PIXELS) return;
    throw this.refuse(`a picture may have ${MOST_PIXELS / 1e6} megapixels, this one is ${width} × ${height}; make it smaller`);
  }

  /** The text of a prompt with the tokens of pictures where the chat template has their places. */
  expanded(text, pictures) {
    const { processor } = this.about;
    const parts = text.split(processor.placeholder);
    if (parts.length !== pictures.length + 1) {
      const places = `${parts.length - 1} places for images (${processor.placeholder})`;
      throw this.refuse(`the prompt has ${places}, and there are ${pictures.length} pictures`);
    }
    return parts.map((part, i) => (i ? textOf(processor, this.layout(pictures[i - 1])) : "") + part).join("");
  }

  /** Which tokens of a prompt are whose. */
  placed(ids, pictures) {
    const { processor, token, placeholders } = this.about;
    const positions = ids.flatMap((id, at) => (id === token ? [at] : []));
    const other = ids.find((id) => id !== token && placeholders.includes(id));
    if (other !== undefined) throw this.refuse(`the prompt has the token ${other}, which stands for an image that is not there`);
    const images = pictures.map((picture) => {
      const { tiles } = this.layout(picture);
      const count = tiles.reduce((sum, tile) => sum + tokensOf(processor, tile), 0);
      const unit = processor.patch * processor.merge;
      return { picture, positions: positions.splice(0, count), count, grid: [tiles[0].rows / unit, tiles[0].columns / unit] };
    });
    if (positions.length || images.some((image) => image.positions.length !== image.count)) {
      throw this.refuse("the prompt has another number of tokens of images than its pictures");
    }
    return new PromptImages(this.about, ids, images);
  }

  /** Features of all pictures of a prompt; false if `signal` ends that. */
  async encode({ images }, signal, report) {
    const total = new Set(images.map(({ picture }) => picture.key)).size;
    let done = 0;
    const own = new Map();
    for (const image of images) {
      const { key } = image.picture;
      let picture = own.get(key) ?? this.known.get(key) ?? image.picture;
      if (!own.has(key)) report({ stage: "pictures", done: done++, total });
      picture.features ??= await this.tower.encode(picture, this.layout(picture), signal, report);
      for (const each of [picture, image.picture]) each.forget();
      if (!picture.features) return false;
      own.set(key, picture);
      image.picture = picture;
      this.#keep(picture);
    }
    return true;
  }

  #keep(picture) {
    this.known.delete(picture.key);
    this.known.set(picture.key, picture);
    let bytes = [...this.known.values()].reduce((sum, each) => sum + each.features.byteLength, 0);
    for (const [key, { features }] of this.known) {
      if (bytes <= FEATURE_BYTES) break;
      bytes -= features.byteLength;
      this.known.delete(key);
    }
  }
}
