"""Records what classes of `transformers` take for keys that config.json does not have: tests/data/class_defaults.json.

python -m tests.make_class_defaults FOLDER ...

A FOLDER is an unpacked wheel of transformers. No part of the tests: the classes are read as text, torch is not needed.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from shaderlm.formats.hf.models import MODEL_TYPES

from .test_class_defaults import DATA, TOWERS

# Attributes of classes that are no keys.
_NO_KEYS = {
    *("model_type", "attribute_map", "sub_configs", "architectures", "default_theta", "fsdp_plan"),
    "keys_to_ignore_at_inference",
}


def _literal(node: ast.expr | None) -> Any:
    """Its value, or an Ellipsis for what is computed."""
    try:
        return ast.literal_eval(node) if node is not None else ...
    except ValueError:
        return ...


def _defaults(made: ast.ClassDef) -> dict[str, Any]:
    """Of a class: its attributes, and the arguments of __init__."""
    found: dict[str, Any] = {}
    for node in made.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _literal(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _literal(node.value)
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            named = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            found |= {each.arg: _literal(value) for each, value in zip(named, node.args.defaults, strict=True)}
    if "rope_parameters" in found:  # since version 5
        theta = found.get("default_theta", 10000.0)
        found["rope_theta"] = theta.get("global", ...) if isinstance(theta, dict) else theta
    plain = (bool, int, float, str, list, type(None))
    return {key: value for key, value in found.items() if isinstance(value, plain) or key == "model_type"}


def main(folders: list[str]) -> None:
    wanted = {*MODEL_TYPES, *(f"{name}_text" for name in MODEL_TYPES), *TOWERS}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for folder in folders:
        versions = ast.parse((Path(folder) / "transformers/__init__.py").read_text(encoding="utf-8")).body
        version = next(_literal(each.value) for each in versions if "__version__" in ast.unparse(each)[:11])  # type: ignore[attr-defined]
        for path in sorted((Path(folder) / "transformers/models").glob("*/configuration_*.py")):
            for made in ast.parse(path.read_text(encoding="utf-8")).body:
                if not isinstance(made, ast.ClassDef):
                    continue
                defaults = _defaults(made)
                name = defaults.get("model_type")
                if name in wanted and ("Vision" not in made.name or name in TOWERS):
                    kept = {key: value for key, value in defaults.items() if key not in _NO_KEYS and key[:5] != "base_"}
                    found.setdefault(name, {}).setdefault(version, kept)
    DATA.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
