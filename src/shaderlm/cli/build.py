"""Which build was measured."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path


def commit() -> str:
    """The commit of the checkout that this package runs from, if it does."""
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        with suppress(OSError, subprocess.SubprocessError):
            command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return "unknown"
