// The largest key of a workgroup and the lowest index that has it. One lane joins BEST_GROUP neighbours, then every lane joins
// the groups. Needs: const WG, a multiple of BEST_GROUP. Call from uniform control flow; every lane gets the result.

const BEST_GROUP: u32 = 16u;

struct Best {
    key: u32,
    index: u32,
}

var<workgroup> best_slots: array<vec2<u32>, WG>;
var<workgroup> best_groups: array<vec2<u32>, WG / BEST_GROUP>;

fn better(a: Best, b: Best) -> Best {
    let wins = b.key > a.key || (b.key == a.key && b.index < a.index);
    return Best(select(a.key, b.key, wins), select(a.index, b.index, wins));
}

// The best of four keys at i, i + step, i + 2 step and i + 3 step.
fn best_of_four(keys: vec4<u32>, i: u32, step: u32) -> Best {
    let key = max(max(keys.x, keys.y), max(keys.z, keys.w));
    let first = select(select(select(3u, 2u, keys.z == key), 1u, keys.y == key), 0u, keys.x == key);
    return Best(key, i + first * step);
}

fn best_of_workgroup(mine: Best, lane: u32) -> Best {
    best_slots[lane] = vec2<u32>(mine.key, mine.index);
    workgroupBarrier();
    if (lane < WG / BEST_GROUP) {
        var best = Best(0u, 0xffffffffu);
        for (var i = 0u; i < BEST_GROUP; i = i + 1u) {
            let other = best_slots[lane * BEST_GROUP + i];
            best = better(best, Best(other.x, other.y));
        }
        best_groups[lane] = vec2<u32>(best.key, best.index);
    }
    workgroupBarrier();
    var best = Best(0u, 0xffffffffu);
    for (var i = 0u; i < WG / BEST_GROUP; i = i + 1u) {
        best = better(best, Best(best_groups[i].x, best_groups[i].y));
    }
    return best;
}
