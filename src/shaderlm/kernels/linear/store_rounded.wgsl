// What a lane of a GEMV does with the sums of STORED rows (2 or 4) where the product that follows takes rounded inputs:
// gate(y[n]) · y[n + 1] for even n, y[n] = bias[n] + sum, rounded to 16 bits with one unit per block of 32 as by
// round_quarter. Here a block is rounded once; there, every workgroup would round all of them.
// Exports: begin(first), store_rows(first, sums), finish_rows(workgroup, lane). Same functions as store_rows.
// Needs: const WG, LANES_PER_ROW, ROWS, STORED; bias, params, gate, shared/int16_round; 64 rows of the weight to a
// workgroup, or a multiple; n a multiple of 64; a barrier between begin and store_rows.

// Planes of four words for each block: bytes h of the first 16 and bytes l, h and l of the others, and (unit, unit · Σ of
// the first 16, the same of the others, not written).
@group(0) @binding(0) var<storage, read_write> out: array<u32>;  // [5, n_total / 32, 4]

const RESULTS: u32 = WG / LANES_PER_ROW * ROWS / 2u;  // of a workgroup
const SIXTEEN_ROUNDERS: u32 = 0xB4000000u;            // their bits, modulo 2^32

var<workgroup> results: array<f32, RESULTS>;
var<workgroup> tops: array<atomic<u32>, RESULTS / 32u>;  // largest magnitude of each block, as bits: see int16_round

fn begin(first: u32) {
    for (var i = 0u; i < RESULTS / 32u; i = i + 1u) {
        atomicStore(&tops[i], 0u);
    }
}

fn biased(n: u32, sum: f32) -> f32 {
    if ((params.epilogue & 1u) != 0u) {
        return sum + bias[min(n, params.n - 1u)];
    }
    return sum;
}

fn keep_result(at: u32, result: f32) {
    results[at] = result;
    atomicMax(&tops[at / 32u], bitcast<u32>(result) & 0x7FFFFFFFu);
}

fn store_rows(first: u32, sums: vec4<f32>) {
    let at = first / 2u % RESULTS;
    keep_result(at, gate(biased(first, sums.x)) * biased(first + 1u, sums.y));
    if (STORED > 2u) {
        keep_result(at + 1u, gate(biased(first + 2u, sums.z)) * biased(first + 3u, sums.w));
    }
}

fn result_quad(at: u32) -> vec4<f32> {
    return vec4<f32>(results[at], results[at + 1u], results[at + 2u], results[at + 3u]);
}

// Eight lanes round a block; each stores one word of bytes h and one of bytes l. There are no shuffles: all subgroups would
// have to take part in them. Gate and up of gemma-3-1b take 7.5 µs on an H200; with shuffles and a lane for each value, 8.0.
fn finish_rows(workgroup: u32, lane: u32) {
    workgroupBarrier();
    let block = workgroup * (RESULTS / 32u) + lane / 8u;
    if (lane >= RESULTS / 4u || block >= params.n / 64u) {
        return;
    }
    let own = lane / 8u * 32u;
    let word = lane % 8u;
    let half = word / 4u;
    let top = atomicLoad(&tops[lane / 8u]);
    let unit = bitcast<f32>(top) * (1.0 / 32512.0);
    let per_unit = vec4<f32>(select(1.0 / unit, 0.0, top < 0x0DA24260u));
    var bits = vec4<u32>();  // of the lane's half of the block
    for (var i = 0u; i < 4u; i = i + 1u) {
        bits = bits + bitcast<vec4<u32>>(fma(result_quad(own + half * 16u + i * 4u), per_unit, vec4<f32>(ROUNDER)));
    }
    let sum = bitcast<i32>(bits.x + bits.y + bits.z + bits.w - SIXTEEN_ROUNDERS);
    let mine = bitcast<vec4<u32>>(fma(result_quad(own + word * 4u), per_unit, vec4<f32>(ROUNDER)));
    // Infinity or NaN in a block makes every sum over it NaN.
    let shown = bitcast<f32>(select(bitcast<u32>(unit), 0x7FC00000u, top >= 0x7F800000u));
    let blocks = params.n_total / 32u;
    let to = params.n_first / 32u + block;
    out[(2u * half * blocks + to) * 4u + word % 4u] = h_bytes(mine);
    out[((2u * half + 1u) * blocks + to) * 4u + word % 4u] = low_bytes(mine);
    if (word % 4u == 0u) {
        out[(4u * blocks + to) * 4u + 1u + half] = bitcast<u32>(shown * f32(sum));
    }
    if (word == 0u) {
        out[(4u * blocks + to) * 4u] = bitcast<u32>(shown);
    }
}
