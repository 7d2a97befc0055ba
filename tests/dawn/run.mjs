// Runs plans saved as JSON (docs/plans.md) under Dawn, the WebGPU implementation in Chrome.
//
//   node run.mjs MANIFEST.json DATA.bin RESULTS.json RESULTS.bin
//
// MANIFEST.json
//   {"programs": [{
//     "name": str,
//     "mode": "run" | "compile",
//     "plan": a plan of format 1, composed for the target "browser",
//     "data": {buffer name: [offset, length] in DATA.bin}}]}
//   Buffers without data start as zeros; parameters are in the plan. A buffer is as long as its data, or as the plan says.
//
// RESULTS.json
//   {"adapter": {vendor, architecture, device, description, features, limits},
//    "results": [{"name", "status": "ok" | "error", "message"?,
//                 "outputs": {name: [offset, length] in RESULTS.bin}}]}
//
// "run" executes on the default adapter. "compile" stops after pipeline creation and uses Dawn's null
// backend, which offers features (shader-f16) that software adapters lack. Devices get the default
// WebGPU limits in both modes, so a program that passes here fits every WebGPU implementation.
//
// Exit status: 0 results written (the caller judges them), 2 bad usage, 3 no adapter.

import fs from 'node:fs';
import { create, globals } from 'webgpu';

Object.assign(globalThis, globals);

// Workgroup memory is not zeroed first: no kernel may rely on that, and SwiftShader takes ten times as long to
// compile the zeroing as the kernel.
const BACKENDS = { run: ['enable-dawn-features=disable_workgroup_init'], compile: ['backend=null'] };
const FORMAT = 1; // of plans
const FEATURES = { f16: 'shader-f16', subgroups: 'subgroups' }; // as plans call them, as WebGPU does
const BINDING_TYPES = ['read-only-storage', 'storage', 'uniform'];
const SCOPES = ['validation', 'out-of-memory', 'internal'];
const CONTEXT_LINES = 3;
const LIMITS = [
  'maxBufferSize',
  'maxStorageBufferBindingSize',
  'maxUniformBufferBindingSize',
  'maxStorageBuffersPerShaderStage',
  'minStorageBufferOffsetAlignment',
  'maxComputeWorkgroupStorageSize',
  'maxComputeInvocationsPerWorkgroup',
  'maxComputeWorkgroupSizeX',
  'maxComputeWorkgroupSizeY',
  'maxComputeWorkgroupSizeZ',
  'maxComputeWorkgroupsPerDimension',
];

/** A failure with an exit status of its own. */
class Exit extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// ---- adapters and devices -------------------------------------------------------------------------

const instances = {}; // Dawn's instance must outlive its adapters, so these stay referenced.

async function requestAdapter(mode) {
  instances[mode] ??= create(BACKENDS[mode]);
  return instances[mode].requestAdapter();
}

function describe(adapter) {
  const { vendor, architecture, device, description } = adapter.info;
  const limits = Object.fromEntries(LIMITS.map((name) => [name, adapter.limits[name]]));
  return { vendor, architecture, device, description, features: [...adapter.features].sort(), limits };
}

const devices = new Map();

/** The one device of a mode and feature set, with its pipelines so far. */
async function deviceFor(mode, features) {
  const key = JSON.stringify([mode, [...features].sort()]);
  if (!devices.has(key)) {
    // An adapter gives out one device only, so each device asks for its own adapter.
    const adapter = await requestAdapter(mode);
    const missing = features.filter((name) => !adapter.features.has(name));
    if (missing.length) {
      throw new Error(
        `the ${mode === 'run' ? 'default adapter' : 'null backend'} (${adapter.info.device}) lacks ` +
          `${missing.join(', ')}; it offers ${[...adapter.features].sort().join(', ')}`,
      );
    }
    const device = await adapter.requestDevice({ requiredFeatures: features });
    const entry = { device, pipelines: new Map(), stray: [] };
    device.addEventListener('uncapturederror', (event) => entry.stray.push(event.error.message));
    device.lost.then((info) => {
      entry.stray.push(`device lost (${info.reason}): ${info.message}`);
      devices.delete(key); // The next program gets a new device.
    });
    devices.set(key, entry);
  }
  return devices.get(key);
}

/** Calls body() inside all error scopes; throws what they caught, after the prefix `where`. */
async function scoped(device, where, body) {
  for (const filter of SCOPES) device.pushErrorScope(filter);
  let value;
  let thrown = null;
  try {
    value = body();
  } catch (error) {
    thrown = error;
  }
  // Scopes pop in the reverse of the order in which they were pushed.
  const caught = await Promise.all([...SCOPES].reverse().map(() => device.popErrorScope()));
  const messages = caught.filter(Boolean).map((error) => error.message.trim());
  if (thrown) messages.push(thrown.message);
  if (messages.length) throw new Error(`${where}: ${messages.join('\n')}`);
  return value;
}

// ---- pipelines ------------------------------------------------------------------------------------

/** The numbered source lines around a 1-based line, with a caret under the column when it is known. */
function excerpt(source, line, column, length) {
  const lines = source.split('\n');
  const first = Math.max(1, line - CONTEXT_LINES);
  const last = Math.min(lines.length, line + CONTEXT_LINES);
  const width = String(last).length;
  const out = [];
  for (let i = first; i <= last; i++) {
    out.push(`${i === line ? '>' : ' '} ${String(i).padStart(width)} | ${lines[i - 1]}`);
    if (i === line && column > 0) {
      const text = lines[i - 1];
      const indent = text.slice(0, column - 1).replace(/[^\t]/g, ' '); // Tabs keep the caret in place.
      const carets = Math.max(1, Math.min(length, text.length - column + 1));
      out.push(`  ${' '.repeat(width)} | ${indent}${'^'.repeat(carets)}`);
    }
  }
  return out.join('\n');
}

async function compilationErrors(module, source) {
  const { messages } = await module.getCompilationInfo();
  if (!messages.some((message) => message.type === 'error')) return null;
  return messages
    .map(({ type, message, lineNum, linePos, length }) =>
      lineNum > 0
        ? `${type} at ${lineNum}:${linePos}: ${message}\n${excerpt(source, lineNum, linePos, length)}`
        : `${type}: ${message}`,
    )
    .join('\n');
}

async function makePipeline(device, { label, source, bindings }) {
  let module;
  const failure = await scoped(device, 'shader module', () => {
    module = device.createShaderModule({ label, code: source });
  }).catch((error) => error);
  // The scope repeats the compilation errors, but only the compilation info has their lines.
  const errors = module && (await compilationErrors(module, source));
  if (errors) throw new Error(`shader module: ${errors}`);
  if (failure) throw failure;

  const groupLayout = await scoped(device, 'bind group layout', () =>
    device.createBindGroupLayout({
      label,
      entries: bindings.map(({ access }, binding) => ({
        binding,
        visibility: GPUShaderStage.COMPUTE,
        buffer: { type: access },
      })),
    }),
  );
  const pipeline = await scoped(device, 'pipeline', () =>
    device.createComputePipeline({
      label,
      layout: device.createPipelineLayout({ label, bindGroupLayouts: [groupLayout] }),
      compute: { module, entryPoint: 'main' },
    }),
  );
  return { pipeline, groupLayout };
}

/** The step's pipeline, from the cache when a step with this source and these binding types came before. */
function pipelineFor({ device, pipelines }, step) {
  const key = JSON.stringify([step.source, step.bindings.map(({ access }) => access)]);
  if (!pipelines.has(key)) pipelines.set(key, makePipeline(device, step));
  return pipelines.get(key); // A promise, so a failure is cached as well.
}

// ---- programs -------------------------------------------------------------------------------------

/** What a plan runs: WebGPU's features, buffers with their contents, steps with their shaders. */
function programOf({ mode, plan, data }) {
  if (plan?.format !== FORMAT || plan.target !== 'browser') {
    throw new Error(`expected a plan of format ${FORMAT} for "browser", got ${plan?.format} for "${plan?.target}"`);
  }
  const features = plan.features.map((name) => FEATURES[name]);
  if (features.includes(undefined)) throw new Error(`the plan needs ${plan.features}; known: ${Object.keys(FEATURES)}`);
  const buffers = {};
  for (const [name, { bytes, words }] of Object.entries(plan.buffers)) {
    const given = data[name] ?? null;
    const size = Math.max(16, Math.ceil(Math.max(bytes, given ? given[1] : 0) / 16) * 16);
    buffers[name] = { size, data: given, words };
  }
  const steps = plan.steps.map(({ shader, bindings, grid }) => {
    const { label, wgsl } = plan.shaders[shader];
    return { label, source: `${wgsl.join('\n')}\n`, bindings, grid };
  });
  return { mode, features, buffers, steps, outputs: mode === 'run' ? plan.outputs : [] };
}

/** Throws when the program asks for something that is not there. */
function check({ mode, buffers, steps, outputs }) {
  if (!Object.hasOwn(BACKENDS, mode)) {
    throw new Error(`mode is ${JSON.stringify(mode)}; expected "run" or "compile"`);
  }
  const known = (name) => Object.hasOwn(buffers, name);
  const names = Object.keys(buffers).join(', ') || 'none';
  for (const { label, bindings } of steps) {
    bindings.forEach(({ buffer, access }, i) => {
      const where = `step ${label}: binding ${i}`;
      if (!BINDING_TYPES.includes(access)) {
        throw new Error(`${where} has the access ${JSON.stringify(access)}; expected ${BINDING_TYPES.join(', ')}`);
      }
      if (mode === 'run' && !known(buffer)) {
        throw new Error(`${where} names the buffer ${JSON.stringify(buffer)}; the program has ${names}`);
      }
    });
  }
  for (const name of outputs) {
    if (mode === 'run' && !known(name)) {
      throw new Error(`output ${JSON.stringify(name)} is no buffer; the program has ${names}`);
    }
  }
}

/** Bytes of DATA.bin, padded with zeros to a multiple of 4 as writeBuffer wants. */
function readData(fd, [offset, length]) {
  const bytes = new Uint8Array(Math.ceil(length / 4) * 4);
  let done = 0;
  while (done < length) {
    const got = fs.readSync(fd, bytes, done, length - done, offset + done);
    if (!got) throw new Error(`data [${offset}, ${length}] ends after the end of DATA.bin (${offset + done} bytes)`);
    done += got;
  }
  return bytes;
}

/** Writes all bytes; one writeSync may take fewer. */
function writeAll(fd, bytes) {
  for (let done = 0; done < bytes.length; ) done += fs.writeSync(fd, bytes, done);
}

/** An encoder with one finished compute pass. */
function encodePass(device, dispatches) {
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  for (const dispatch of dispatches) dispatch(pass);
  pass.end();
  return encoder;
}

async function execute(entry, program, pipelines, dataFd, sink) {
  const { device } = entry;
  const { STORAGE, UNIFORM, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
  const live = [];
  const createBuffer = (label, size, usage) => {
    const buffer = device.createBuffer({ label, size, usage });
    live.push(buffer);
    return buffer;
  };
  try {
    const buffers = {};
    for (const [name, { size, data, words }] of Object.entries(program.buffers)) {
      await scoped(device, `buffer ${name}`, () => {
        buffers[name] = createBuffer(name, size, STORAGE | UNIFORM | COPY_SRC | COPY_DST);
        if (data) device.queue.writeBuffer(buffers[name], 0, readData(dataFd, data));
        if (words) device.queue.writeBuffer(buffers[name], 0, new Uint32Array(words));
      });
    }

    const dispatches = [];
    for (const [i, { label, bindings, grid }] of program.steps.entries()) {
      const { pipeline, groupLayout } = pipelines[i];
      const group = await scoped(device, `step ${label}: bind group`, () =>
        device.createBindGroup({
          label,
          layout: groupLayout,
          entries: bindings.map(({ buffer, offset, size }, binding) => ({
            binding,
            resource: { buffer: buffers[buffer], offset, size },
          })),
        }),
      );
      const dispatch = (pass) => {
        pass.setPipeline(pipeline);
        pass.setBindGroup(0, group);
        pass.dispatchWorkgroups(...grid);
      };
      // Dawn reports encoding errors at finish(), for the whole pass. Encoding the step once by itself,
      // never submitted, tells which step is at fault.
      await scoped(device, `step ${label}: dispatch`, () => encodePass(device, [dispatch]).finish());
      dispatches.push(dispatch);
    }

    const staging = await scoped(device, 'outputs', () =>
      program.outputs.map((name) => createBuffer(`output ${name}`, program.buffers[name].size, MAP_READ | COPY_DST)),
    );
    await scoped(device, 'compute pass', () => {
      const encoder = encodePass(device, dispatches);
      program.outputs.forEach((name, i) => {
        encoder.copyBufferToBuffer(buffers[name], 0, staging[i], 0, program.buffers[name].size);
      });
      device.queue.submit([encoder.finish()]);
    });
    await Promise.all(staging.map((buffer) => buffer.mapAsync(GPUMapMode.READ)));
    failIfStray(entry); // Before anything is written: a failed program has no outputs.

    const outputs = {};
    program.outputs.forEach((name, i) => {
      const bytes = new Uint8Array(staging[i].getMappedRange());
      writeAll(sink.fd, bytes);
      outputs[name] = [sink.offset, bytes.length];
      sink.offset += bytes.length;
    });
    return outputs;
  } finally {
    for (const buffer of live) buffer.destroy();
  }
}

/** Throws the errors that no error scope caught. */
function failIfStray(entry) {
  if (entry.stray.length) throw new Error(entry.stray.splice(0).join('\n'));
}

async function runProgram(given, dataFd, sink) {
  const program = programOf(given);
  check(program);
  const entry = await deviceFor(program.mode, program.features);
  entry.stray.length = 0; // What an earlier program left behind is not this one's failure.
  const pipelines = [];
  for (const step of program.steps) {
    try {
      pipelines.push(await pipelineFor(entry, step));
    } catch (error) {
      throw new Error(`step ${step.label}: ${error.message}`);
    }
  }
  if (program.mode === 'run') return execute(entry, program, pipelines, dataFd, sink);
  failIfStray(entry);
  return {};
}

// ---- command line ---------------------------------------------------------------------------------

function openOrExit(path, flags) {
  try {
    return fs.openSync(path, flags);
  } catch (error) {
    throw new Exit(2, `cannot open ${path}: ${error.message}`);
  }
}

function readManifest(path) {
  let manifest;
  try {
    manifest = JSON.parse(fs.readFileSync(path, 'utf8'));
  } catch (error) {
    throw new Exit(2, `cannot read the manifest ${path}: ${error.message}`);
  }
  if (!Array.isArray(manifest?.programs)) throw new Exit(2, `${path} has no list "programs"`);
  return manifest.programs;
}

async function main(args) {
  if (args.length !== 4) {
    throw new Exit(2, `got ${args.length} arguments; usage: run.mjs MANIFEST.json DATA.bin RESULTS.json RESULTS.bin`);
  }
  const [manifestPath, dataPath, resultsPath, binPath] = args;
  const programs = readManifest(manifestPath);
  const dataFd = openOrExit(dataPath, 'r');
  const adapter = await requestAdapter('run');
  if (!adapter) {
    throw new Exit(
      3,
      'Dawn finds no adapter; install a Vulkan driver, or set VK_DRIVER_FILES and VK_ICD_FILENAMES to its ICD file',
    );
  }

  const sink = { fd: openOrExit(binPath, 'w'), offset: 0 };
  const results = [];
  for (const program of programs) {
    try {
      results.push({ name: program.name, status: 'ok', outputs: await runProgram(program, dataFd, sink) });
    } catch (error) {
      results.push({ name: program?.name, status: 'error', message: error.message, outputs: {} });
    }
  }
  fs.closeSync(sink.fd);
  const resultsFd = openOrExit(resultsPath, 'w');
  writeAll(resultsFd, Buffer.from(JSON.stringify({ adapter: describe(adapter), results }, null, 1) + '\n'));
  fs.closeSync(resultsFd);
}

let status = 0;
try {
  await main(process.argv.slice(2));
} catch (error) {
  console.error(`run.mjs: ${error instanceof Exit ? error.message : error.stack}`);
  status = error instanceof Exit ? error.status : 1;
}
process.exit(status); // Dawn keeps the event loop alive, so the process would not end by itself.
