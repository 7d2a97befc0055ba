"""Which command a hint names, for each way to install the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shaderlm.install import install_command


@pytest.mark.parametrize(
    ("file", "text", "command"),
    [
        ("none", "", "pip install 'shaderlm[serve]'"),
        ("pyvenv.cfg", "home = /usr/bin\n", "pip install 'shaderlm[serve]'"),
        ("pyvenv.cfg", "home = /usr/bin\nuv = 0.9.1\n", "uv pip install 'shaderlm[serve]'"),
        (
            "uv-receipt.toml",
            '[tool]\nrequirements = [{ name = "shaderlm", extras = ["structured"] }]\n',
            "uv tool install 'shaderlm[serve,structured]'",
        ),
        ("uv-receipt.toml", '[tool]\nrequirements = [{ name = "shaderlm" }]\n', "uv tool install 'shaderlm[serve]'"),
        (
            "uv-receipt.toml",
            '[tool]\nrequirements = [{ name = "shaderlm", directory = "/home/me/shaderlm" }, { name = "pillow" }]\n',
            "uv tool install '/home/me/shaderlm[serve]'",
        ),
        (
            "uv-receipt.toml",
            '[tool]\nrequirements = [{ name = "shaderlm", git = "https://example.org/shaderlm" }]\n',
            "uv tool install 'shaderlm[serve] @ git+https://example.org/shaderlm'",
        ),
        ("uv-receipt.toml", "[tool", "pip install 'shaderlm[serve]'"),
        ("uv-receipt.toml", "[tool]\nrequirements = []\n", "pip install 'shaderlm[serve]'"),
        (
            "pipx_metadata.json",
            json.dumps({"main_package": {"package_or_url": "git+https://example.org/shaderlm"}}),
            "pipx install --force 'shaderlm[serve] @ git+https://example.org/shaderlm'",
        ),
        (
            "pipx_metadata.json",
            json.dumps({"main_package": {"package_or_url": "shaderlm"}}),
            "pipx install --force 'shaderlm[serve]'",
        ),
        (
            "pipx_metadata.json",
            json.dumps({"main_package": {"package_or_url": "/home/me/shaderlm[dawn]"}}),
            "pipx install --force '/home/me/shaderlm[dawn,serve]'",
        ),
        (
            "pipx_metadata.json",
            json.dumps({"main_package": {"package_or_url": "shaderlm==0.1"}}),
            "pipx install --force 'shaderlm[serve]'",
        ),
        ("pipx_metadata.json", "[]", "pip install 'shaderlm[serve]'"),
    ],
)
def test_the_command_of_each_installer(
    file: str, text: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_command("serve") == command


def test_packages_that_are_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_command("structured", upgrade=True) == "pip install -U 'shaderlm[structured]'"
