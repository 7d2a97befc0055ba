"""What `import shaderlm` gives."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import shaderlm

from .fake_runner import fake_model


def test_modules_are_attributes_without_an_import_of_their_own() -> None:
    code = (
        "import sys, shaderlm; loaded = 'numpy' in sys.modules; print(shaderlm.errors.InputError, loaded, shaderlm.ops)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("<class 'shaderlm.errors.InputError'> False <module 'shaderlm.ops'")


def test_drivers_can_start_before_numpy_is_imported() -> None:
    """It takes as long to import as a driver to start: `begin_opening` has both done at once."""
    code = "import sys; from shaderlm.gpu import begin_opening; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


def test_dir_has_what_users_need() -> None:
    assert dir(shaderlm) == sorted([*shaderlm.__all__, "errors", "ops"])
    assert all(hasattr(shaderlm, name) for name in dir(shaderlm))


def test_unknown_attributes() -> None:
    for name in ("nothing", "_nothing", "load_model", "", "no.thing"):
        with pytest.raises(AttributeError, match=f"module 'shaderlm' has no attribute '{name}'"):
            getattr(shaderlm, name)


def test_a_model_cannot_be_pickled() -> None:
    model, _ = fake_model("the")
    with pytest.raises(TypeError, match=r"a LanguageModel cannot be pickled or copied: .*; load it in each process"):
        pickle.dumps(model)
    model.close()
