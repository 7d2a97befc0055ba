"""Variables of the environment that drivers read while they start."""

from __future__ import annotations

import os

import pytest

from shaderlm.gpu.environment import variables


@pytest.mark.parametrize(("before", "inside"), [(None, "fatal"), ("", "fatal"), ("debug", "debug")])
def test_a_variable_has_a_value_for_a_while(monkeypatch: pytest.MonkeyPatch, before: str | None, inside: str) -> None:
    monkeypatch.delenv("EGL_LOG_LEVEL", raising=False)
    if before is not None:
        monkeypatch.setenv("EGL_LOG_LEVEL", before)
    with variables(EGL_LOG_LEVEL="fatal"):
        assert os.environ["EGL_LOG_LEVEL"] == inside
    assert os.environ.get("EGL_LOG_LEVEL") == before
