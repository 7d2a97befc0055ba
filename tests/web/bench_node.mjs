// Speed of an export in Node, with Dawn as the npm package `webgpu` has it: no part of the tests.
//
//   npm install webgpu
//   node tests/web/bench_node.mjs FOLDER [--variant NAME] [--rounds 5] [--ahead 3] [--checked] [--webgpu PATH]
//
// FOLDER is an export; its own shaderlm.js runs it. Prints tokens per second as medians of rounds: tg128, 128 tokens
// after a prompt of one, and pp512, a prompt of 512. --ahead: steps on their way. --checked: with Dawn's checks of
// arguments and bounds, which browsers make. --webgpu: index.js of the package, if it is not installed.

import { readFileSync, rmSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    variant: { type: "string" },
    rounds: { type: "string", default: "5" },
    ahead: { type: "string" },
    checked: { type: "boolean", default: false },
    webgpu: { type: "string" },
  },
});
if (positionals.length !== 1) {
  console.error("give one folder of an export: node bench_node.mjs FOLDER");
  process.exit(2);
}
const folder = resolve(positionals[0]);

const { create } = await import(values.webgpu ? pathToFileURL(resolve(values.webgpu)) : "webgpu");
const toggles = ["allow_unsafe_apis", "vulkan_enable_f16_on_nvidia", "disable_workgroup_init"];
if (!values.checked) toggles.push("disable_robustness", "skip_validation");
const gpu = create([`enable-dawn-features=${toggles}`, "disable-dawn-features=enable_spirv_validation"]);

const { load } = await runtime();
const started = performance.now();
const model = await load(folder, { gpu, variant: values.variant });
console.log(`${model.info.name}: ${model.info.variant} on ${model.info.device}`);
console.log(`loaded in ${((performance.now() - started) / 1000).toFixed(2)} s`);

const plan = JSON.parse(readFileSync(`${folder}/plan.json`));
const rounds = Number(values.rounds);
const length = Math.min(512, plan.model.context - 1);
const count = Math.min(128, plan.model.context - 2);
const prefill = { work: () => generated(randomIds(length), 1), speed: ({ promptSeconds }) => length / promptSeconds };
const decode = { work: () => generated(randomIds(1), count + 1), speed: ({ decodeSeconds }) => count / decodeSeconds };
for (const [name, { work, speed }] of [[`tg${count}`, decode], [`pp${length}`, prefill]]) {
  for (const end = performance.now() + 1000; ; ) {
    await work(); // clocks are low after idling, and the first run compiles
    if (performance.now() > end) break;
  }
  const found = [];
  let host = 0;
  for (let round = 0; round < rounds; round++) {
    const last = await work();
    found.push(speed(last));
    host += (1e3 * last.hostSeconds) / last.completionTokens;
  }
  found.sort((a, b) => a - b);
  const [least, median, most] = [found[0], found[rounds >> 1], found.at(-1)].map((value) => value.toFixed(1));
  const spent = `${(host / rounds).toFixed(3)} ms of this thread for a submission`;
  console.log(`${name} ${median} tokens/s (${least} to ${most}, ${rounds} rounds; ${spent})`);
}
model.close();
process.exit(0); // Dawn's threads would go on

/** shaderlm.js of the export; with another number of steps ahead, a copy of it. */
async function runtime() {
  const path = `${folder}/shaderlm.js`;
  if (!values.ahead) return import(pathToFileURL(path));
  const copy = `${folder}/.bench-${process.pid}.mjs`;
  const text = readFileSync(path, "utf8");
  writeFileSync(copy, text.replace(/^const STEPS_AHEAD = \d+/m, `const STEPS_AHEAD = ${Number(values.ahead)}`));
  try {
    return await import(pathToFileURL(copy));
  } finally {
    rmSync(copy);
  }
}

function randomIds(size) {
  return Array.from({ length: size }, () => Math.floor(Math.random() * plan.model.vocabulary));
}

async function generated(ids, max_tokens) {
  for await (const _ of model.complete(ids, { max_tokens, ignore_eos: true }));
  if (model.last.completionTokens !== max_tokens) throw new Error(`got ${model.last.completionTokens} tokens`);
  return model.last;
}
