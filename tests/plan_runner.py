"""Runs plans saved as JSON with wgpu: independent of the package, to see that a plan is complete by itself.

python plan_runner.py FOLDER PROMPTS COUNT DEVICE: FOLDER has plans.json (as `shaderlm plan --json` prints it) and
tensors.npz with the checkpoint's tensors as their files have them (rows of bytes, or f32 vectors). Prints the tokens of
greedy generations as JSON, one list for each of the prompts, which are lists of ids: the first plan reads each of them,
and the second decodes all together. Imports json, NumPy and wgpu, and nothing of this project.
"""

import json
import sys

import numpy as np
import wgpu

PAGE, LAST, NONE, RUN = 128, 0x80000000, 0xFFFFFFFF, 0x80000000
FEATURES = {"f16": "shader-f16", "subgroups": "subgroup"}
LIMITS = {
    "max_invocations": "max-compute-invocations-per-workgroup",
    "max_workgroup_memory": "max-compute-workgroup-storage-size",
    "max_storage_buffers": "max-storage-buffers-per-shader-stage",
    "max_workgroups": "max-compute-workgroups-per-dimension",
    "max_binding": "max-storage-buffer-binding-size",
}
USAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.UNIFORM | wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.COPY_SRC


def part_of(tensors, name, rows, first=0, width=0, rotary=0, group=0, stride=0):
    """Rows of a tensor; of each head of `width` rows, i and i + rotary / 2 are neighbours if a width is given.

    Of every `stride` rows the first `group`, if there are such.
    """
    if group:
        starts = range(first, first + rows // group * stride, stride)
        return np.concatenate([tensors[name].reshape(-1, tensors[name].shape[-1])[i : i + group] for i in starts])
    taken = tensors[name][first : first + rows]
    if not width:
        return taken
    heads = taken.reshape(rows // width, width, *taken.shape[1:])
    halves = heads[:, :rotary].reshape(len(heads), 2, rotary // 2, *taken.shape[1:])
    return np.concatenate([halves.swapaxes(1, 2).reshape(heads[:, :rotary].shape), heads[:, rotary:]], 1).reshape(
        taken.shape
    )


def rows_of(about, tensors, first, end):
    """Rows of a weight: of one tensor, of several stacked, or of several in turns."""
    parts = [part_of(tensors, *part) for part in about["tensors"]]
    if about["interleaved"]:
        each = [part[first // len(parts) : end // len(parts)] for part in parts]
        return np.stack(each, axis=1).reshape(end - first, -1)
    return np.concatenate(parts)[first:end]


def weight(about, tensors):
    """The bytes of one weight buffer, in the layout that the plan describes."""
    if about["part"] == "vector":
        vectors = [part_of(tensors, *part).astype(np.float32) for part in about["tensors"]]
        joined = np.stack(vectors, axis=1).reshape(-1) if about["interleaved"] else np.concatenate(vectors)
        first, end = about.get("rows", (0, joined.size))
        return np.ascontiguousarray(joined[first:end]).view(np.uint8)
    first, end = about["rows"]
    raw, layout = rows_of(about, tensors, first, end), about["layout"]
    if layout["kind"] == "dense":
        return np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    assert layout["kind"] == "split", f"this runner does not know the layout {layout}"
    begin, stop = layout[about["part"]]
    blocks = raw.view(np.uint8).reshape(len(raw), -1, layout["block_bytes"])
    return np.ascontiguousarray(blocks[:, :, begin:stop]).reshape(-1)


def rope_table(about, rows, tensors):
    """(cos, sin) of every position and pair, computed in float64."""
    frequencies = about["theta"] ** (-np.arange(0, about["rotary"], 2, dtype=np.float64) / about["rotary"])
    if about["factors"]:
        frequencies = frequencies / tensors[about["factors"]].astype(np.float64)
    angles = (np.arange(rows) / about["linear_scale"])[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32).view(np.uint8).reshape(-1)


class Runner:
    """One device, the buffers that plans share by name, and the plans bound to them."""

    def __init__(self, adapter, plans, tensors, sequences, positions):
        for plan in plans:
            missing = [name for name in plan["features"] if FEATURES[name] not in adapter.features]
            missing += [name for name, least in plan["limits"].items() if adapter.limits[LIMITS[name]] < least]
            assert not missing, f"the plan {plan['name']} needs {missing}, which this adapter does not have"
        wanted = sorted({FEATURES[name] for plan in plans for name in plan["features"]})
        self.device = adapter.request_device_sync(required_features=wanted, required_limits=adapter.limits)
        self.buffers, sizes, contents = {}, {}, {}
        for number, plan in enumerate(plans):
            for name, about in plan["buffers"].items():
                role, key = about["role"], name
                if role == "params":
                    key = f"{number} {name}"
                    contents[key] = np.array(about["words"], np.uint32).view(np.uint8)
                elif role == "weight" and name not in contents:
                    contents[name] = weight(about, tensors)
                elif role == "table":
                    contents[name] = rope_table(about, positions, tensors)
                rows = sequences * positions if role == "state" and name.endswith("_cache") else 1
                sizes[key] = max(
                    sizes.get(key, 64), about["bytes"] * rows, contents[key].size if key in contents else 0
                )
        pages = sequences * positions // PAGE  # sequence i has the pages from i · positions / PAGE on
        sizes["tokens"], sizes["page_table"] = max(64, 4 * sequences), 4 * (pages + 1)
        contents["page_table"] = np.arange(pages, dtype=np.uint32).view(np.uint8)
        for name, size in sizes.items():
            self.buffers[name] = self.device.create_buffer(size=(size + 15) // 16 * 16, usage=USAGE)
            if name in contents:
                self.write(name, contents[name])
        self.plans = [self.bound(number, plan) for number, plan in enumerate(plans)]

    def write(self, name, data):
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.device.queue.write_buffer(self.buffers[name], 0, np.pad(raw, (0, -raw.size % 4)))

    def bound(self, number, plan):
        """Pipeline, bind group and grid of every step."""
        modules = [self.device.create_shader_module(code="\n".join(s["wgsl"]) + "\n") for s in plan["shaders"]]
        pipelines, steps = {}, []
        for step in plan["steps"]:
            access = tuple(binding["access"] for binding in step["bindings"])
            key = (step["shader"], access)
            if key not in pipelines:
                entries = [{"binding": i, "visibility": 4, "buffer": {"type": kind}} for i, kind in enumerate(access)]
                layout = self.device.create_bind_group_layout(entries=entries)
                module, entry = modules[step["shader"]], plan["shaders"][step["shader"]]["entry"]
                made = self.device.create_pipeline_layout(bind_group_layouts=[layout])
                compute = {"module": module, "entry_point": entry}
                pipelines[key] = self.device.create_compute_pipeline(layout=made, compute=compute), layout
            pipeline, layout = pipelines[key]
            resources = []
            for i, binding in enumerate(step["bindings"]):
                name, about = binding["buffer"], plan["buffers"][binding["buffer"]]
                buffer = self.buffers[f"{number} {name}" if about["role"] == "params" else name]
                offset, size = binding.get("offset", 0), binding.get("size")
                resource = {"buffer": buffer, "offset": offset, "size": size or buffer.size - offset}
                resources.append({"binding": i, "resource": resource})
            group = self.device.create_bind_group(layout=layout, entries=resources)
            steps.append((pipeline, group, step["grid"]))
        return steps

    def run(self, number):
        encoder = self.device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        for pipeline, group, grid in self.plans[number]:
            compute.set_pipeline(pipeline)
            compute.set_bind_group(0, group)
            compute.dispatch_workgroups(*grid)
        compute.end()
        self.device.queue.submit([encoder.finish()])
        return np.frombuffer(self.device.queue.read_buffer(self.buffers["tokens"], 0), np.uint32).tolist()


def outputs(rows, slots):
    """One greedy output of each row."""
    records = np.zeros((len(rows), 8), np.uint32)
    records[:, 0], records[:, 1] = rows, slots
    return records


def main(folder, prompts, count=8, device=""):
    with open(f"{folder}/plans.json", encoding="utf-8") as file:
        plans = json.load(file)  # of a prefill and of a decode step
    tensors = np.load(f"{folder}/tensors.npz")
    found = wgpu.gpu.enumerate_adapters_sync()
    adapter = next(a for a in found if device in f"{a.info['device']} {a.info['adapter_type']}".lower())
    size = 4 * PAGE
    runner = Runner(adapter, plans, tensors, len(prompts), size)
    rows, tokens = plans[0]["tokens"], []
    for slot, ids in enumerate(prompts):
        assert len(ids) <= rows, f"the prefill plan takes {rows} tokens"
        batch = np.zeros((1 + rows, 4), np.uint32)
        batch[0] = (len(ids), 1, 0, 0)
        positions, table = np.arange(len(ids)), slot * size // PAGE | (RUN if len(ids) >= 8 else 0)
        batch[1 : 1 + len(ids)] = np.stack([ids, positions, slot * size + positions, np.full(len(ids), table)], axis=1)
        batch[1 + len(ids) :, 2] = NONE
        runner.write("batch", batch)
        runner.write("outputs", outputs([len(ids) - 1], [slot]))
        tokens.append([runner.run(0)[slot]])
    slots = range(len(prompts))
    places = [(LAST | i, len(prompts[i]), i * size + len(prompts[i]), i * size // PAGE) for i in slots]
    runner.write("batch", np.array([(len(slots), len(slots), 0, 0), *places], np.uint32))
    runner.write("outputs", outputs(slots, slots))
    for _ in range(count - 1):
        found = runner.run(1)
        for slot in slots:
            tokens[slot].append(found[slot])
    return tokens


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
