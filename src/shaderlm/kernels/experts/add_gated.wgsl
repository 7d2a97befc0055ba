// out[t] = a[t] + sigmoid(Σ_k x[t, k] · gate[k]) · b[t]
// Grid: one workgroup per row, folded.

const WG: u32 = 64u;

struct Params {
    tokens: u32,
    width: u32,
    k: u32,
}

@group(0) @binding(0) var<storage, read> a: array<f32>;            // [tokens, width]
@group(0) @binding(1) var<storage, read> b: array<f32>;            // [tokens, width]
@group(0) @binding(2) var<storage, read> x: array<f32>;            // [tokens, k]
@group(0) @binding(3) var<storage, read> gate: array<f32>;         // [k]
@group(0) @binding(4) var<storage, read_write> out: array<f32>;    // [tokens, width]
@group(0) @binding(5) var<uniform> params: Params;

var<workgroup> slots: array<f32, WG>;

@compute @workgroup_size(WG)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let row = group.x + group.y * groups.x;
    if (row >= row_count()) {
        return;
    }
    var sum = 0.0;
    for (var i = lane; i < params.k; i = i + WG) {
        sum = sum + x[row * params.k + i] * gate[i];
    }
    slots[lane] = sum;
    workgroupBarrier();
    for (var width = WG / 2u; width > 0u; width = width / 2u) {
        if (lane < width) {
            slots[lane] = slots[lane] + slots[lane + width];
        }
        workgroupBarrier();
    }
    // Below −88 exp overflows.
    let factor = select(1.0 / (1.0 + exp(-max(slots[0], -88.0))), 0.0, slots[0] < -88.0);
    for (var i = lane; i < params.width; i = i + WG) {
        out[row * params.width + i] = a[row * params.width + i] + factor * b[row * params.width + i];
    }
}
