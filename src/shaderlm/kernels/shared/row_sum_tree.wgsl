// Sums over the LANES_PER_ROW lanes of each lane group of a workgroup: a tree in workgroup memory. Runs on every device.
// Call from uniform control flow; the first lane of each lane group gets the result. Needs: const WG, LANES_PER_ROW, ROWS.

var<workgroup> row_slots: array<vec4<f32>, WG>;

fn row_sum(value: vec4<f32>, lane: u32) -> vec4<f32> {
    row_slots[lane] = value;
    workgroupBarrier();
    for (var width = LANES_PER_ROW / 2u; width > 0u; width = width / 2u) {
        if (lane % LANES_PER_ROW < width) {
            row_slots[lane] = row_slots[lane] + row_slots[lane + width];
        }
        workgroupBarrier();
    }
    return row_slots[lane - lane % LANES_PER_ROW];
}
