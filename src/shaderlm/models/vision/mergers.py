"""What follows the last layer of a tower: from the values of patches to the features of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .parts import Parts


def norm_mlp(parts: Parts, x: str) -> str:
    """Each patch normalised, then neighbours side by side through two matrices."""
    read, layers = parts.norm("v.post_ln", x, parts.patches, parts.sizes.hidden), ("mm.0", "mm.2")
    width = parts.sizes.hidden * parts.sizes.merge**2
    if parts.sizes.window:
        merged = two_matrices(parts, layers, read, width, "v.in_windows")
        return parts.picked(merged, "features", "order", parts.b.tensors[merged].shape[0])
    return two_matrices(parts, layers, read, width, "features")


def two_matrices(
    parts: Parts, layers: tuple[str, str], read: str, width: int, out: str, inner: int = 0, *, bias: bool = True
) -> str:
    """Rows of so many values through two matrices; `inner`: as many values between them, where that is another."""
    y = parts.activated("gelu_erf", parts.linear(layers[0], read, width, inner or width, bias=bias))
    return parts.linear(layers[1], y, inner or width, parts.sizes.out, out, bias=bias)


def merged_mlp(parts: Parts, x: str) -> str:
    """Through two matrices. Where neighbours are merged: each patch normalised, then neighbours through a matrix."""
    sizes = parts.sizes
    if "mm.patch_merger.weight" in sizes.shapes or sizes.merge > 1:
        normed = parts.rms_norm("mm.input_norm", x, parts.patches, sizes.hidden, sizes.merger_eps)
        x = parts.linear("mm.patch_merger", normed, sizes.hidden * sizes.merge**2, sizes.hidden, bias=False)
    bias = "mm.1.bias" in sizes.shapes
    return two_matrices(parts, ("mm.1", "mm.2"), x, sizes.hidden, "features", sizes.out, bias=bias)


def linear(parts: Parts, x: str) -> str:
    """Each patch normalised, then neighbours side by side through one matrix."""
    sizes = parts.sizes
    read = parts.layer_norm("v.post_ln", x, parts.patches, sizes.hidden)
    return parts.linear("mm.model.fc", read, sizes.hidden * sizes.merge**2, sizes.out, "features", bias=False)


def mean_norm_linear(parts: Parts, x: str) -> str:
    """The mean of neighbouring patches, normalised, through one matrix."""
    sizes, rows = parts.sizes, parts.patches // parts.sizes.merge**2
    read = parts.layer_norm("v.post_ln", x, parts.patches, sizes.hidden)
    pooled = parts.b.tensor("v.pooled", rows, sizes.hidden)
    dims = {"tokens": rows, "group": sizes.merge**2, "width": sizes.hidden}
    parts.b.add("mean_rows", dims, {"x": read}, "v", out=pooled)
    normed = parts.rms_norm("mm.soft_emb_norm", pooled, rows, sizes.hidden)
    return parts.linear("mm.input_projection", normed, sizes.hidden, sizes.out, "features", bias=False)


def mean_linear(parts: Parts, x: str) -> str:
    """The mean of neighbouring patches · √hidden, perhaps shifted and scaled, normalised, through one matrix.

    What the factor changes is the eps of the norm alone; the stored shift is divided by it.
    """
    sizes, rows = parts.sizes, parts.patches // parts.sizes.merge**2
    y = parts.b.tensor("v.pooled", rows, sizes.hidden)
    parts.b.add("mean_rows", {"tokens": rows, "group": sizes.merge**2, "width": sizes.hidden}, {"x": x}, "v", out=y)
    if "v.std_bias" in sizes.shapes:
        for op, name in (("add", "v.std_bias"), ("mul", "v.std_scale")):
            pair, counts = {"a": y, "b": parts.stored(name, (sizes.hidden,))}, {"count": rows * sizes.hidden}
            y = parts.b.tensor(f"{name}.out", rows, sizes.hidden)
            parts.b.add(op, {**counts, "period": sizes.hidden}, pair, "v", out=y)
    y = parts.plain_norm(y, 1, sizes.hidden, sizes.eps / sizes.hidden)
    return parts.linear("mm.embedding_projection", y, sizes.hidden, sizes.out, "features", bias=False)


def mlp(parts: Parts, x: str) -> str:
    """Each patch through two matrices, without the row of the class."""
    sizes = parts.sizes
    if sizes.class_rows:
        x = parts.picked(x, "v.kept", "kept", parts.patches - sizes.class_rows)
    return two_matrices(parts, ("mm.0", "mm.2"), x, sizes.hidden, "features", sizes.out)


MERGERS: Mapping[str, Callable[[Parts, str], str]] = {
    "norm_mlp": norm_mlp,
    "linear": linear,
    "mean_norm_linear": mean_norm_linear,
    "merged_mlp": merged_mlp,
    "mean_linear": mean_linear,
    "mlp": mlp,
}
