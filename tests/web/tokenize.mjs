// node tokenize.mjs TOKENIZER.JS JOBS: runs tokenizer.js. Each line of JOBS is a job in JSON, each line printed its result.
//
//   {"load": tokenizer.json, "about": the entry "text" of plan.json}      → null; jobs that follow are for this one
//   {"encode": text, "parseSpecial": true, "mark": ""}                    → ids
//   {"decode": ids}                                                       → text
//   {"time": text}                                                        → seconds to encode it

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const { Tokenizer } = await import(pathToFileURL(process.argv[2]));
let tokenizer;
const JOBS = {
  load: ({ load, about }) => void (tokenizer = new Tokenizer(load, about)),
  encode: ({ encode, ...options }) => tokenizer.encode(encode, options),
  decode: ({ decode }) => tokenizer.decode(decode),
  time: ({ time }) => {
    const begin = performance.now();
    tokenizer.encode(time);
    return (performance.now() - begin) / 1000;
  },
};
const results = [];
for (const line of readFileSync(process.argv[3], "utf8").split("\n")) {
  if (!line) continue;
  const job = JSON.parse(line);
  results.push(JSON.stringify(JOBS[Object.keys(job)[0]](job) ?? null));
}
process.stdout.write(`${results.join("\n")}\n`);
