"""Rewrites kernels that use matrix units for devices that have none: the same text, with matrices as plain loops.

So that such a kernel is computed, and compared, where only a software adapter is. SUBGROUP consecutive lanes act as a
subgroup. A lane keeps the row of a left matrix and the part of a row of a result that are its own; a right matrix stays
where it is and is read by the product.
"""

from __future__ import annotations

import re
from dataclasses import replace

from shaderlm.gpu import Program

_ALIAS = re.compile(r"^alias (\w+) = subgroup_matrix_(left|right|result)<(f16|f32), (\w+), (\w+)>;\n", re.M)
_ARRAY = re.compile(r"var<(?:workgroup|storage[^>]*)>\s*(\w+)\s*:\s*array<(vec4<[uf]32>)")
_ENABLED = re.compile(r"^(enable (f16|chromium_experimental_subgroup_matrix)|diagnostic.*);\n", re.M)
_LOAD = re.compile(r"subgroupMatrixLoad<(\w+), (\w+)>\(&(\w+),")
_STORE = re.compile(r"subgroupMatrixStore<row_major>\(&(\w+),")
_MAIN = re.compile(r"fn main\([^{]*\{\n")


def in_loops(program: Program) -> Program:
    """The program with matrix products as loops, where it has any."""
    return replace(program, steps=tuple(replace(step, source=rewritten(step.source)) for step in program.steps))


def rewritten(source: str) -> str:
    """The source without matrix built-ins."""
    aliases = {kind: (name, columns, rows) for name, kind, _, columns, rows in _ALIAS.findall(source)}
    if not aliases:
        return source
    (left, k, m), (right, n, _), (result, _, _) = (aliases[kind] for kind in ("left", "right", "result"))
    text = _ALIAS.sub("", _ENABLED.sub("", source))
    arrays = dict(_ARRAY.findall(text))
    loaded, stored = set(_LOAD.findall(text)), set(_STORE.findall(text))
    for array in {array for *_, array in loaded} | stored:
        assert array in arrays, f"{array}: matrices lie at multiples of 16 bytes, so that its elements must have 16"
    rights = sorted({array for kind, _, array in loaded if kind == right})
    text = _LOAD.sub(lambda found: f"load_{found[1]}_{found[2]}_{found[3]}(", text)
    text = _STORE.sub(r"store_\1(", text).replace("subgroupMatrixMultiplyAccumulate(", "multiplied(")
    text = _MAIN.sub(lambda found: found[0] + "    matrix_lane = lane % SUBGROUP;\n", text)
    parts = [
        f"""
var<private> matrix_lane: u32;
struct {left} {{ row: array<f32, {k}> }}
struct {right} {{ at: u32, stride: u32, array: u32, by_column: bool }}
struct {result} {{ part: array<f32, {m} * {n} / SUBGROUP> }}
fn own_row() -> u32 {{ return matrix_lane * ({m} * {n} / SUBGROUP) / {n}; }}
fn own_column() -> u32 {{ return matrix_lane * ({m} * {n} / SUBGROUP) % {n}; }}"""
    ]
    parts += [_element(array, arrays[array]) for array in sorted({array for *_, array in loaded} | stored)]
    for kind, order, array in sorted(loaded):
        head = f"fn load_{kind}_{order}_{array}(at: u32, stride: u32) -> {kind} {{"
        if kind == right:
            parts.append(
                f"{head} return {right}(at, stride, {rights.index(array)}u, {str(order == 'col_major').lower()}); }}"
            )
            continue
        assert order == "row_major"
        field, length, first = ("row", k, "0u") if kind == left else ("part", f"{m} * {n} / SUBGROUP", "own_column()")
        parts.append(f"""{head}
    var found = {kind}();
    for (var i = 0u; i < {length}; i++) {{ found.{field}[i] = of_{array}(at + own_row() * stride, {first} + i); }}
    return found;
}}""")
    parts += [_store(array, result, f"{m} * {n} / SUBGROUP") for array in sorted(stored)]
    cases = "\n".join(
        f"    if (b.array == {i}u) {{ value = of_{array}(at, minor); }}" for i, array in enumerate(rights)
    )
    parts.append(f"""
fn right_value(b: {right}, k: u32, n: u32) -> f32 {{
    let at = b.at + select(k, n, b.by_column) * b.stride;
    let minor = select(n, k, b.by_column);
    var value = 0.0;
{cases}
    return value;
}}
fn multiplied(a: {left}, b: {right}, c: {result}) -> {result} {{
    var row = a.row;
    var sums = c.part;
    for (var k = 0u; k < {k}; k++) {{
        for (var i = 0u; i < {m} * {n} / SUBGROUP; i++) {{
            sums[i] = sums[i] + row[k] * right_value(b, k, own_column() + i);
        }}
    }}
    return {result}(sums);
}}""")
    return text + "\n".join(parts)


def _element(array: str, kind: str) -> str:
    """Value i of a row that begins with element `at`: of f16 in words, or of f32."""
    head = f"fn of_{array}(at: u32, i: u32) -> f32"
    if kind == "vec4<f32>":
        return f"{head} {{ return {array}[at + i / 4u][i % 4u]; }}"
    return f"{head} {{ return unpack2x16float({array}[at + i / 8u][i % 8u / 2u])[i % 2u]; }}"


def _store(array: str, result: str, length: str) -> str:
    return f"""fn store_{array}(at: u32, value: {result}, stride: u32) {{
    var part = value.part;
    for (var i = 0u; i < {length}; i++) {{
        let column = own_column() + i;
        {array}[at + own_row() * stride + column / 4u][column % 4u] = part[i];
    }}
}}"""
