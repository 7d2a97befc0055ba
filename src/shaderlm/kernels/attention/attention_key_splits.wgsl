// partial[split, h, d] = Σ_c exp(score_c − m) · v[c, d], and after all of them (m, Σ_c exp(score_c − m)) of [split, h], m = max score,
// score_c = scale · Σ_d q[h, d] · k[c, d], over the keys c of a split that the one row sees: those up to its
// position, of a window the last ones. q = rotate(norm(q, q_norm)), and so is the row's own key, with k_norm. It is not in
// the cache yet: every workgroup makes it for itself, with its value, and the first one of a kv head puts both there.
// norm(x, w) = w · x / sqrt(mean(x²) + eps), over a head.
// LANES_PER_KEY lanes of a subgroup have a key and its value, OWN octets each, in registers from the first load to the last
// sum. There is one barrier, before the sums of a workgroup are joined; those of the splits are joined by what reads them
// (linear/inputs_splits). Split s has the keys c with c / KEYS % SPLITS == s.
// Grid: SPLITS workgroups per query head. Needs: a cache of f16 without a page table, of KEYS · SPLITS rows or more; D a
// multiple of 16 · LANES_PER_KEY, all of it rotated; subgroups of JOINED · LANES_PER_KEY lanes or more, of consecutive
// lanes.

const WG: u32 = 128u;
const LANES_PER_KEY: u32 = 16u;  // 4, 8 or 16
const OWN: u32 = 2u;             // octets of a head that a lane has: D / 8 / LANES_PER_KEY. Even: what is rotated together is in one lane
const SPLITS: u32 = 8u;
const KEYS: u32 = WG / LANES_PER_KEY;  // that a workgroup has at a time
const JOINED: u32 = 1u;                // keys whose sums are joined by shuffles, before those of a workgroup: 1, or 2 of one subgroup
const SLOTS: u32 = KEYS / JOINED;
const OCTETS: u32 = OWN * LANES_PER_KEY;  // D / 8
const QUADS: u32 = 2u * OCTETS;
const OWN_QUADS: u32 = 2u * OWN;

struct Params {
    heads: u32,
    kv_heads: u32,
    scale: f32,
    rotary: u32,    // QUADS
    q_first: u32,   // quads before the first query, where these are columns of a wider row
    k_first: u32,
    v_first: u32,
    eps: f32,       // of the norm of heads
}

@group(0) @binding(0) var<storage, read> q: array<vec4<f32>>;              // [q_first + heads · QUADS or more]
@group(0) @binding(1) var<storage, read> k: array<vec4<f32>>;              // [k_first + kv_heads · QUADS or more]
@group(0) @binding(2) var<storage, read> v: array<vec4<f32>>;              // [v_first + kv_heads · QUADS or more]
@group(0) @binding(3) var<storage, read> q_norm: array<vec4<f32>>;         // [QUADS]
@group(0) @binding(4) var<storage, read> k_norm: array<vec4<f32>>;         // [QUADS]
@group(0) @binding(5) var<storage, read> table: array<vec4<f32>>;          // [rows, rotary] of (cos, sin, cos, sin)
@group(0) @binding(6) var<storage, read> batch: array<vec4<u32>>;          // [2]
@group(0) @binding(7) var<storage, read_write> k_cache: array<vec4<u32>>;  // [pool rows, kv_heads, OCTETS]
@group(0) @binding(8) var<storage, read_write> v_cache: array<vec4<u32>>;  // [pool rows, kv_heads, OCTETS]
@group(0) @binding(9) var<storage, read_write> partial: array<vec4<f32>>;  // [SPLITS, heads, QUADS], [SPLITS, heads]
@group(0) @binding(10) var<uniform> params: Params;

var<workgroup> sums: array<vec4<f32>, SLOTS * QUADS>;  // of values: a slot for each key, or for each two
var<workgroup> tops: array<f32, SLOTS>;                // their largest scores
var<workgroup> totals: array<f32, SLOTS>;              // sums of powers

// Which quad of a head is the lane's j-th. Two make an octet, and quads j and j + OWN lie half a head apart.
fn quad_of(j: u32, lane: u32) -> u32 {
    return (j / 2u * LANES_PER_KEY + lane % LANES_PER_KEY) * 2u + j % 2u;
}

// Over the lanes that share a key.
fn share_sum(value: f32) -> f32 {
    var sum = value;
    for (var offset = 1u; offset < LANES_PER_KEY; offset = offset * 2u) {
        sum = sum + subgroupShuffleXor(sum, offset);
    }
    return sum;
}

// Quads of a head as they are given, and the weights of their norm.
struct Head {
    raw: array<vec4<f32>, OWN_QUADS>,
    weight: array<vec4<f32>, OWN_QUADS>,
}

fn load_head(queries: bool, begin: u32, lane: u32) -> Head {
    var found: Head;
    for (var j = 0u; j < OWN_QUADS; j = j + 1u) {
        found.raw[j] = head_quad(queries, begin + quad_of(j, lane));
        found.weight[j] = head_weight(queries, quad_of(j, lane));
    }
    return found;
}

// What the two halves of a lane's quads are rotated by: by the same, unless pairs lie side by side.
struct Turns {
    first: array<Turn, OWN>,
    second: array<Turn, OWN>,
}

fn load_turns(position: u32, lane: u32) -> Turns {
    var found: Turns;
    for (var j = 0u; j < OWN; j = j + 1u) {
        found.first[j] = turn_at(position, quad_of(j, lane));
        found.second[j] = found.first[j];
        if (INTERLEAVED) {
            found.second[j] = turn_at(position, quad_of(j + OWN, lane));
        }
    }
    return found;
}

// Norm and rotation of a head. All lanes are here.
fn turned(head: Head, turns: Turns, lane: u32) -> array<vec4<f32>, OWN_QUADS> {
    var square = 0.0;
    for (var j = 0u; j < OWN_QUADS; j = j + 1u) {
        square = square + dot(head.raw[j], head.raw[j]);
    }
    let root = inverseSqrt(share_sum(square) / f32(4u * QUADS) + params.eps);
    var found: array<vec4<f32>, OWN_QUADS>;
    for (var j = 0u; j < OWN; j = j + 1u) {
        let one = head.raw[j] * head.weight[j];
        let other = head.raw[j + OWN] * head.weight[j + OWN];
        found[j] = rotate(one, other, turns.first[j], quad_of(j, lane)) * root;
        found[j + OWN] = rotate(other, one, turns.second[j], quad_of(j + OWN, lane)) * root;
    }
    return found;
}

fn octet(first: vec4<f32>, second: vec4<f32>) -> vec4<u32> {
    return vec4<u32>(
        pack2x16float(first.xy), pack2x16float(first.zw), pack2x16float(second.xy), pack2x16float(second.zw),
    );
}

// What a lane has of a key and of its value.
struct Pair {
    key: array<vec4<u32>, OWN>,
    value: array<vec4<u32>, OWN>,
}

fn load_pair(row: u32, kv_head: u32, lane: u32) -> Pair {
    let at = (row * params.kv_heads + kv_head) * OCTETS + lane % LANES_PER_KEY;
    var found: Pair;
    for (var j = 0u; j < OWN; j = j + 1u) {
        found.key[j] = k_cache[at + j * LANES_PER_KEY];
        found.value[j] = v_cache[at + j * LANES_PER_KEY];
    }
    return found;
}

@compute @workgroup_size(WG)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let head = group.x / SPLITS;
    let split = group.x % SPLITS;
    let heads_of_kv = params.heads / params.kv_heads;
    let kv_head = head / heads_of_kv;
    let at_once = KEYS * SPLITS;
    let own_key = split * KEYS + lane / LANES_PER_KEY;  // of those at once
    // Nothing that is asked for here waits for the record; keys that the row does not see are left out.
    let given_query = load_head(true, params.q_first + head * QUADS, lane);
    let given_key = load_head(false, params.k_first + kv_head * QUADS, lane);
    var fresh: Pair;  // the row's own key and value
    for (var j = 0u; j < OWN; j = j + 1u) {
        let at = params.v_first + kv_head * QUADS + quad_of(2u * j, lane);
        fresh.value[j] = octet(v[at], v[at + 1u]);
    }
    var next = load_pair(own_key, kv_head, lane);
    let row = batch_row(0u);
    let pool_rows = arrayLength(&k_cache) / (params.kv_heads * OCTETS);
    let last = min(row.position, pool_rows - 1u);  // a wrong position leads to no row outside the pool
    let first = first_key(last);
    let turns = load_turns(min(row.position, arrayLength(&table) / params.rotary - 1u), lane);
    let query = turned(given_query, turns, lane);
    let key = turned(given_key, turns, lane);
    for (var j = 0u; j < OWN; j = j + 1u) {
        fresh.key[j] = octet(key[2u * j], key[2u * j + 1u]);
    }
    if (split == 0u && head % heads_of_kv == 0u && lane < LANES_PER_KEY && row.slot < pool_rows) {
        let at = (row.slot * params.kv_heads + kv_head) * OCTETS + lane;
        for (var j = 0u; j < OWN; j = j + 1u) {
            k_cache[at + j * LANES_PER_KEY] = fresh.key[j];
            v_cache[at + j * LANES_PER_KEY] = fresh.value[j];
        }
    }
    let begin = first / at_once * at_once;
    if (WINDOW > 0u && begin > 0u) {  // the window is past its first keys: others are asked for
        next = load_pair(min(begin + own_key, pool_rows - 1u), kv_head, lane);
    }
    var top = -3.4e38;
    var total = 0.0;
    var sum: array<vec4<f32>, OWN_QUADS>;
    for (var base = begin; base <= last; base = base + at_once) {
        let c = base + own_key;
        var now = next;
        if (base + at_once <= last) {
            next = load_pair(min(c + at_once, pool_rows - 1u), kv_head, lane);
        }
        if (c == row.slot) {
            now = fresh;
        }
        var score = 0.0;
        for (var j = 0u; j < OWN; j = j + 1u) {
            score = score + dot(query[2u * j], unit_quad(now.key[j], 0u));
            score = score + dot(query[2u * j + 1u], unit_quad(now.key[j], 1u));
        }
        score = capped(params.scale * share_sum(score));
        if (c >= first && c <= last) {
            let largest = max(top, score);
            let kept = exp(top - largest);
            let power = exp(score - largest);
            for (var j = 0u; j < OWN; j = j + 1u) {
                sum[2u * j] = kept * sum[2u * j] + power * unit_quad(now.value[j], 0u);
                sum[2u * j + 1u] = kept * sum[2u * j + 1u] + power * unit_quad(now.value[j], 1u);
            }
            total = kept * total + power;
            top = largest;
        }
    }
    let slot = lane / LANES_PER_KEY / JOINED;
    if (JOINED == 2u) {
        let largest = max(top, subgroupShuffleXor(top, LANES_PER_KEY));
        let kept = exp(top - largest);
        top = largest;
        total = kept * total;
        total = total + subgroupShuffleXor(total, LANES_PER_KEY);
        // Of two lanes with the same quads of two values, one joins the first half of them, the other one the second.
        let second = lane / LANES_PER_KEY % 2u;
        for (var j = 0u; j < OWN; j = j + 1u) {
            let own = select(sum[j], sum[j + OWN], second == 1u);
            let other = select(sum[j + OWN], sum[j], second == 1u);
            sums[slot * QUADS + quad_of(j + OWN * second, lane)] = kept * own + subgroupShuffleXor(kept * other, LANES_PER_KEY);
        }
    } else {
        for (var j = 0u; j < OWN_QUADS; j = j + 1u) {
            sums[slot * QUADS + quad_of(j, lane)] = sum[j];
        }
    }
    if (lane % (JOINED * LANES_PER_KEY) == 0u) {
        tops[slot] = top;
        totals[slot] = total;
    }
    workgroupBarrier();
    var largest = tops[0];
    for (var i = 1u; i < SLOTS; i = i + 1u) {
        largest = max(largest, tops[i]);
    }
    for (var column = lane; column < QUADS; column = column + WG) {
        var joined = vec4<f32>();
        var powers = 0.0;
        for (var i = 0u; i < SLOTS; i = i + 1u) {
            let power = exp(tops[i] - largest);
            joined = joined + power * sums[i * QUADS + column];
            powers = powers + power * totals[i];
        }
        let at = split * params.heads + head;
        partial[at * QUADS + column] = joined;
        if (column == 0u) {
            partial[SPLITS * params.heads * QUADS + at] = vec4<f32>(largest, powers, 0.0, 0.0);
        }
    }
}
