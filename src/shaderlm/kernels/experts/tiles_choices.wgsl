// The tiles of linear_matrix and linear_tile_int16 where rows are choices, expert by expert (group_experts), and a tile has
// those of one expert. Exports: Params, Tile, find_tile(index), input_row(m), weight_row(n), and store_row(m, n, sums): what
// becomes of four neighbouring sums of a row. Same functions as linear/tiles_rows and linear/store_row. Needs: BN,
// store_choice.

struct Params {
    k: u32,           // multiple of 32
    n: u32,           // rows of the matrix of one expert
    groups: u32,      // groups of scales per row
    each: u32,        // choices that share a row of x
    tiles: u32,       // of the list
    combine: u32,     // what becomes of the sums
    split: u32,       // parts of k: 1
}

@group(0) @binding(0) var<storage, read> order: array<u32>;        // choices, expert by expert
@group(0) @binding(1) var<storage, read> tiles: array<vec4<u32>>;  // expert, first of order, end

const NONE: u32 = 0xFFFFFFFFu;

struct Tile {
    there: bool,
    part: u32,
    m0: u32,
    n0: u32,
    rows: u32,
}

var<private> expert: u32;
var<private> end_of_tile: u32;

fn find_tile(index: u32) -> Tile {
    // Tiles that share weights are neighbours: they run at the same time and find them in the cache.
    let n0 = index / params.tiles * BN;
    let entry = tiles[index % params.tiles];
    expert = entry.x;
    end_of_tile = entry.z;
    return Tile(entry.x != NONE && n0 < params.n, 0u, entry.y, n0, entry.z);
}

fn input_row(m: u32) -> u32 {
    return order[m] / params.each;
}

fn weight_row(n: u32) -> u32 {
    return expert * params.n + n;
}

fn store_row(m: u32, n: u32, sums: vec4<f32>) {
    if (m < end_of_tile && n < params.n) {
        store_choice(order[m], expert, n + vec4<u32>(0u, 1u, 2u, 3u), sums);
    }
}
