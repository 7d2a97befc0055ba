"""`python -m shaderlm.gpu.wgpu_native.generate`: write bindings.py from declarations.py.

cffi parses declarations at run time, or ahead of time into a module without a line of C to compile. wgpu-py does the
first with the whole header: 0.4 s before the first call, and 30 to 70 ms again for each C type that is used. The second
costs nothing when the module is imported.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from .declarations import c_declarations

HERE = Path(__file__).parent
_HEADER = """\
# Written by generate.py from declarations.py. Do not edit.
# ruff: noqa
# fmt: off
# mypy: ignore-errors
"""


def bindings() -> str:
    """The text of bindings.py."""
    from cffi import FFI  # type: ignore[import-untyped]

    builder = FFI()
    builder.cdef(c_declarations())
    builder.set_source("bindings", None)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "bindings.py"
        builder.emit_python_code(str(path))
        return _HEADER + path.read_text(encoding="utf-8").split("\n", 1)[1]  # after cffi's own remark


if __name__ == "__main__":
    (HERE / "bindings.py").write_text(bindings(), encoding="utf-8")
