// The largest of four keys at four indices that comes after another one: a smaller key, or the same at a higher index.
// Needs: keys, best.

fn next_of_four(keys: vec4<u32>, indices: vec4<u32>, there: vec4<bool>, after: Best) -> Best {
    let same = (keys == vec4<u32>(after.key)) & (indices > vec4<u32>(after.index));
    let left = select(vec4<u32>(), keys, there & (same | (keys < vec4<u32>(after.key))));
    var best = better(Best(left.x, indices.x), Best(left.y, indices.y));
    best = better(best, Best(left.z, indices.z));
    return better(best, Best(left.w, indices.w));
}
