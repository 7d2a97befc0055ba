// The tiles of linear_matrix and linear_tile_int16, of all rows of x and one weight. Exports: Params, Tile, find_tile(index), input_row(m) and
// weight_row(n), the rows of x_half and weight that row m and column n of the product belong to. Same functions as
// experts/tiles_choices. Needs: BM, BN and row_count.

struct Params {
    tokens: u32,
    k: u32,           // multiple of 32
    n: u32,           // rows of this range of the weight
    groups: u32,      // groups of scales per row
    n_first: u32,     // where this range starts in a row of out
    n_total: u32,     // length of a row of out
    epilogue: u32,    // what becomes of the sums
    split: u32,       // parts of k: 1 for linear_tile_int16
    queries: u32,     // rows of queries, for rope and the cache
    keys: u32,        // rows of keys, and as many of values
    width: u32,       // D
    rotary: u32,      // elements of a head that are rotated
}

struct Tile {
    there: bool,
    part: u32,  // of k
    m0: u32,    // its first row and column
    n0: u32,
    rows: u32,  // where rows end
}

fn find_tile(index: u32) -> Tile {
    // By the rows that there are, not those of the bucket: workgroups without work come last.
    let rows = row_count();
    let tiles_m = max(1u, (rows + BM - 1u) / BM);
    let tiles = tiles_m * ((params.n + BN - 1u) / BN);
    // Tiles that share weights are neighbours: they run at the same time and find them in the cache.
    let m0 = (index % tiles % tiles_m) * BM;
    return Tile(index < tiles * params.split, index / tiles, m0, (index % tiles / tiles_m) * BN, rows);
}

fn input_row(m: u32) -> u32 {
    return m;
}

fn weight_row(n: u32) -> u32 {
    return n;
}
