// histogram[r, :] = how many logits each bin of row r has, and what their weights lack
// Second of four dispatches of sampling, for the rows whose threshold is searched for. A logit lacks less than 1 / 16 of
// the largest weight that its bin can have. That is counted in whole numbers: sums do not depend on who adds first.
// Grid: one workgroup per (row, chunk), folded.

const WG: u32 = 256u;
const CHUNK: u32 = 2048u;

struct Params {
    rows: u32,
    width: u32,
    parts: u32,  // chunks per row
    unit: f32,   // parts of the largest weight of a bin; width / 16 of them fit 32 bits
}

@group(0) @binding(0) var<storage, read> logits: array<u32>;                   // [rows, width], the bits of f32
@group(0) @binding(1) var<storage, read> outputs: array<vec4<u32>>;            // [rows, 2]
@group(0) @binding(2) var<storage, read> extents: array<vec2<u32>>;            // [rows, parts]
@group(0) @binding(3) var<storage, read_write> histogram: array<atomic<u32>>;  // [rows, 2, BINS]: counts, lacks
@group(0) @binding(4) var<uniform> params: Params;

var<workgroup> counts: array<atomic<u32>, BINS>;
var<workgroup> lacks: array<atomic<u32>, BINS>;

fn count_in(bin: u32, units: u32, there: bool) {
    if (there) {
        atomicAdd(&counts[bin], 1u);
        atomicAdd(&lacks[bin], units);
    }
}

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let index = group.x + group.y * groups.x;
    let row = index / params.parts;
    if (row >= output_count()) {
        return;
    }
    let given = settings_of(row);
    if (!searches(given)) {
        return;
    }
    for (var bin = lane; bin < BINS; bin = bin + WG) {
        atomicStore(&counts[bin], 0u);
        atomicStore(&lacks[bin], 0u);
    }
    let extent = extent_of(row, lane);  // its barriers are those that the zeros need
    let span = span_of(given, extent.x);
    let scale = scale_of(span, extent);
    let first = row * params.width + (index % params.parts) * CHUNK;
    let end = min(first + CHUNK, (row + 1u) * params.width);
    for (var i = lane; i < CHUNK; i = i + 4u * WG) {
        let keys = four_keys(first + i, end);
        let depths = depths_of(span, scale, keys);
        let bins = bins_at(depths);
        let weights = exp(-scale.step * (depths - vec4<f32>(bins)));
        let units = vec4<u32>(params.unit * (vec4<f32>(1.0) - weights) + vec4<f32>(0.5));
        count_in(bins.x, units.x, keys.x >= span.floor);
        count_in(bins.y, units.y, keys.y >= span.floor);
        count_in(bins.z, units.z, keys.z >= span.floor);
        count_in(bins.w, units.w, keys.w >= span.floor);
    }
    workgroupBarrier();
    for (var bin = lane; bin < BINS; bin = bin + WG) {
        let count = atomicLoad(&counts[bin]);
        if (count > 0u) {
            atomicAdd(&histogram[row * 2u * BINS + bin], count);
            atomicAdd(&histogram[row * 2u * BINS + BINS + bin], atomicLoad(&lacks[bin]));
        }
    }
}
