// Sums over the LANES_PER_ROW lanes of each lane group of a workgroup, given the size of subgroups: inside them first, then
// over one slot per subgroup. Right for every size of four or more, given that a subgroup holds consecutive lanes: steps as
// wide as a subgroup or wider are computed and dropped, so that control flow stays uniform. All lanes are here.
// Lane groups whose size is no power of two lie across subgroups: as many of their lanes as are sure to be in one have a
// slot.
// Exports: row_sums(value, lane, size); lane_group_of_sums(lane) and has_sums(lane, count), which lanes get the sums of
// which lane group: one of each, or ADDERS; where IN_SUBGROUP, aligned_sums(value, size) does the same without a barrier.
// Needs: shared/subgroup_lanes; const WG, LANES_PER_ROW, ROWS; workgroup array row_slots: an element for each subgroup, or
// for each lane group if that is smaller, if LANES_PER_ROW is a power of two; for each four lanes if it is a multiple of 4;
// else for each lane.

// Lanes of a lane group that are sure to be in one subgroup, if that has so many: the largest power of two that divides
// LANES_PER_ROW, from four on. Of two, nothing is gained: gate and up of gemma-3-1b, lane groups of 18, took 7.6 instead of
// 7.5 µs on an H200.
const ALIGNED: u32 = select(1u, LANES_PER_ROW & ~(LANES_PER_ROW - 1u), LANES_PER_ROW % 4u == 0u || LANES_PER_ROW < 4u);

const IN_SUBGROUP: bool = SUBGROUP >= LANES_PER_ROW && ALIGNED == LANES_PER_ROW;

// Lanes that add the slots of a lane group: some neighbours where there are many slots, one for each lane. Gate and up of
// gemma-3-1b, lane groups of 18, took 0.2 µs longer with one lane. With 9 or 27 slots, of lane groups of 36 and 108, nothing
// is gained; with the 6 of smollm2-135m's head time is lost.
const ADDERS: u32 = select(1u, select(4u, 8u, SUBGROUP >= 8u), ALIGNED == 1u && LANES_PER_ROW > 16u);
const STRIDE: u32 = select(LANES_PER_ROW, ADDERS, ADDERS > 1u);  // between the lanes that get the sums of two lane groups

// The lane group whose sums this lane adds up. (The last one, where there is none left.)
fn lane_group_of_sums(lane: u32) -> u32 {
    return min(lane / STRIDE, WG / LANES_PER_ROW - 1u);
}

// Is this lane one of the first `count` that get the sums of a lane group? Where one lane adds them up, that is the first of
// the lane group.
fn has_sums(lane: u32, count: u32) -> bool {
    return lane % STRIDE < count && lane < WG / LANES_PER_ROW * STRIDE;
}

// Over the ALIGNED lanes of a lane group that are neighbours, or over a subgroup, if that has fewer. All lanes get them.
fn aligned_sums(value: vec4<f32>, size: u32) -> vec4<f32> {
    var partial = value;
    for (var offset = 1u; offset < ALIGNED; offset = offset * 2u) {
        var other = vec4<f32>(subgroupShuffleXor(partial.x, offset), 0.0, 0.0, 0.0);
        if (ROWS > 1u) {
            other.y = subgroupShuffleXor(partial.y, offset);
        }
        if (ROWS > 2u) {
            other.z = subgroupShuffleXor(partial.z, offset);
        }
        if (ROWS > 3u) {
            other.w = subgroupShuffleXor(partial.w, offset);
        }
        partial = select(partial, partial + other, offset < size);
    }
    return partial;
}

fn row_sums(value: vec4<f32>, lane: u32, size: u32) -> vec4<f32> {
    let partial = aligned_sums(value, size);
    let width = min(size, ALIGNED);
    if (lane % width == 0u) {
        row_slots[lane / width] = partial;
    }
    workgroupBarrier();
    var total = vec4<f32>();
    let slots = LANES_PER_ROW / width;
    let first = lane_group_of_sums(lane) * slots;
    if (ADDERS == 1u) {
        if (has_sums(lane, 1u)) {
            for (var i = 0u; i < slots; i = i + 1u) {
                total = total + row_slots[first + i];
            }
        }
        return total;
    }
    for (var base = 0u; base < slots; base = base + ADDERS) {
        let i = base + lane % ADDERS;
        total = total + select(vec4<f32>(), row_slots[first + min(i, slots - 1u)], i < slots);
    }
    for (var offset = 1u; offset < ADDERS; offset = offset * 2u) {
        total.x = total.x + subgroupShuffleXor(total.x, offset);
        if (ROWS > 1u) {
            total.y = total.y + subgroupShuffleXor(total.y, offset);
        }
        if (ROWS > 2u) {
            total.z = total.z + subgroupShuffleXor(total.z, offset);
        }
        if (ROWS > 3u) {
            total.w = total.w + subgroupShuffleXor(total.w, offset);
        }
    }
    return total;
}
