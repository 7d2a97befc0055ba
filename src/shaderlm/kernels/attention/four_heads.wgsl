// Values of four query heads that the lanes of a key share: every lane has those of one head.
// Exports: own_head(heads, lane), all_heads(value, lane), other(value, offset).
// Needs: const SUBGROUP, LANES_PER_KEY (4 or more).

// Of four heads the sum over the lanes of a key: of head 2a + b for lanes whose number ends in bits b a.
fn own_head(heads: vec4<f32>, lane: u32) -> f32 {
    let odd = lane % 2u == 1u;
    let kept = select(heads.xy, heads.zw, odd);
    let sent = select(heads.zw, heads.xy, odd);
    let pair = kept + vec2<f32>(subgroupShuffleXor(sent.x, 1u), subgroupShuffleXor(sent.y, 1u));
    let upper = lane / 2u % 2u == 1u;
    var sum = select(pair.x, pair.y, upper) + subgroupShuffleXor(select(pair.y, pair.x, upper), 2u);
    for (var offset = 4u; offset < LANES_PER_KEY; offset = offset * 2u) {
        sum = sum + subgroupShuffleXor(sum, offset);
    }
    return sum;
}

// What every lane of a key has of one head each, for all four.
fn all_heads(value: f32, lane: u32) -> vec4<f32> {
    let first = lane % SUBGROUP / 4u * 4u;
    return vec4<f32>(
        subgroupShuffle(value, first), subgroupShuffle(value, first + 2u),
        subgroupShuffle(value, first + 1u), subgroupShuffle(value, first + 3u),
    );
}

fn other(value: vec4<f32>, offset: u32) -> vec4<f32> {
    return vec4<f32>(
        subgroupShuffleXor(value.x, offset), subgroupShuffleXor(value.y, offset),
        subgroupShuffleXor(value.z, offset), subgroupShuffleXor(value.w, offset),
    );
}
