// Runs programs of the tests: dispatches over named buffers, as tests/browser_device.py sends them. Knows no ops.
//
// A batch is a binary file: the length of its JSON (uint32), the JSON, and after the next multiple of 4 the contents of
// buffers. The JSON has new shaders by hash, and programs whose steps are written as in the JSON of plans.

const opened = new Map();  // devices by name

/** Opens a device with these features of WebGPU, and the limits of the adapter if `full`, else those that all grant. */
export async function open(name, features, full) {
  if (!navigator.gpu) throw new Error("this page has no navigator.gpu");
  const adapter = await navigator.gpu.requestAdapter();
  if (!adapter) throw new Error("navigator.gpu has no adapter");
  const given = adapter.features;
  const limits = {};
  if (full) for (const key in adapter.limits) limits[key] = adapter.limits[key];
  const asked = { requiredFeatures: features.filter((feature) => given.has(feature)), requiredLimits: limits };
  const device = await adapter.requestDevice(asked);
  const state = { device, shaders: new Map(), pipelines: new Map(), layouts: new Map(), lost: "" };
  device.lost.then((info) => { state.lost = `the device was lost (${info.reason}): ${info.message}`; });
  opened.set(name, state);
  const granted = {};
  for (const key in device.limits) granted[key] = device.limits[key];
  const { vendor, architecture, device: model, description, subgroupMinSize, subgroupMaxSize } = adapter.info;
  const info = { vendor, architecture, device: model, description, subgroupMinSize, subgroupMaxSize };
  return { features: [...device.features], limits: granted, info };
}

/** The layout of bindings with these accesses: shaders share it. */
function layoutOf(state, accesses) {
  const key = accesses.join();
  if (!state.layouts.has(key)) {
    const entries = accesses.map((type, binding) => ({ binding, visibility: GPUShaderStage.COMPUTE, buffer: { type } }));
    state.layouts.set(key, state.device.createBindGroupLayout({ entries }));
  }
  return state.layouts.get(key);
}

/** Begins to compile what a step needs, once. The promise gives {pipeline, layout} or {error}. */
function pipelineOf(state, step) {
  const accesses = step.bindings.map((binding) => binding.access);
  const key = `${step.shader} ${accesses.join()}`;
  if (!state.pipelines.has(key)) state.pipelines.set(key, compile(state, state.shaders.get(step.shader), accesses));
  return state.pipelines.get(key);
}

async function compile({ device, ...state }, shader, accesses) {
  device.pushErrorScope("validation");
  const layout = layoutOf({ device, ...state }, accesses);
  const module = device.createShaderModule({ label: shader.label, code: shader.wgsl });
  const making = device.createComputePipelineAsync({
    label: shader.label,
    layout: device.createPipelineLayout({ bindGroupLayouts: [layout] }),
    compute: { module, entryPoint: "main" },
  }).catch((problem) => problem);
  const wrong = await device.popErrorScope();
  const said = (await module.getCompilationInfo()).messages;
  const errors = said.filter((each) => each.type === "error").map((each) => `line ${each.lineNum}: ${each.message}`);
  const pipeline = await making;
  const error = errors.join("; ") || (wrong && wrong.message) || (pipeline instanceof Error && pipeline.message);
  return error ? { error: `${shader.label}: ${error}` } : { pipeline, layout };
}

/** Runs one program; its outputs, one after the other, as bytes. */
async function run(state, program, contents) {
  const { device } = state;
  const made = await Promise.all(program.steps.map((step) => pipelineOf(state, step)));
  const failed = made.find((each) => each.error);
  if (failed) throw new Error(failed.error);
  for (const filter of ["validation", "out-of-memory", "internal"]) device.pushErrorScope(filter);
  const buffers = {};
  const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST | GPUBufferUsage.COPY_SRC;
  for (const [name, { bytes, at }] of Object.entries(program.buffers)) {
    buffers[name] = device.createBuffer({ label: name, size: bytes, usage });
    if (at !== undefined) device.queue.writeBuffer(buffers[name], 0, contents, at, bytes);
  }
  const total = program.outputs.reduce((sum, name) => sum + program.buffers[name].bytes, 0);
  const staging = device.createBuffer({ size: total, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  program.steps.forEach((step, i) => {
    const entries = step.bindings.map(({ buffer, offset, size }, binding) => (
      { binding, resource: { buffer: buffers[buffer], offset: offset ?? 0, size: size ?? undefined } }));
    pass.setPipeline(made[i].pipeline);
    pass.setBindGroup(0, device.createBindGroup({ label: step.shader, layout: made[i].layout, entries }));
    pass.dispatchWorkgroups(...step.grid);
  });
  pass.end();
  let offset = 0;
  for (const name of program.outputs) {
    encoder.copyBufferToBuffer(buffers[name], 0, staging, offset, program.buffers[name].bytes);
    offset += program.buffers[name].bytes;
  }
  device.queue.submit([encoder.finish()]);
  const mapped = staging.mapAsync(GPUMapMode.READ).catch((problem) => problem);
  const wrong = (await Promise.all([1, 2, 3].map(() => device.popErrorScope()))).filter((each) => each);
  const problem = await mapped;
  const labels = program.steps.map((step) => state.shaders.get(step.shader).label).join(", ");
  if (wrong.length || problem) throw new Error(`${labels}: ${wrong[0]?.message ?? state.lost ?? problem.message}`);
  const found = new Uint8Array(staging.getMappedRange()).slice();
  for (const each of [staging, ...Object.values(buffers)]) each.destroy();
  return found;
}

/** Fetches a batch, runs its programs, sends their outputs back in one body, and returns what went wrong with each. */
export async function runBatch(name, url) {
  const state = opened.get(name);
  const file = await (await fetch(url)).arrayBuffer();
  const length = new DataView(file).getUint32(0, true);
  const { shaders, programs } = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 4, length)));
  const contents = new Uint8Array(file, (4 + length + 3) & ~3);
  for (const [hash, shader] of Object.entries(shaders)) state.shaders.set(hash, shader);
  for (const program of programs) for (const step of program.steps) pipelineOf(state, step);  // on all cores
  const problems = [];
  const found = [];
  for (const program of programs) {
    try {
      found.push(await run(state, program, contents));
      problems.push("");
    } catch (problem) {
      problems.push(problem.message || "a program failed and does not say why");
    }
  }
  await fetch(url, { method: "POST", body: new Blob(found) });
  return problems;
}

Object.assign(window, { open_device: open, runBatch, ready: true });
