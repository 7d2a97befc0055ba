"""`./dev`: what it prints while it sets things up. Nothing is installed: the environment's Python is a script."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PYTHON = """#!/bin/sh
case "$*" in
  *"-m pip install"*) echo "pip says a lot"; echo "pip warns" >&2; exit {code} ;;
  *"-m pip --version"*) ;;
  *"shaderlm.gpu.probe"*) echo "An Adapter (software, Vulkan)" ;;
  *) exec "{real}" "$@" ;;
esac
"""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell script")


UV = """#!/bin/sh
echo "$*" >>uv.log
exit {code}
"""


def setup(tmp_path: Path, code: int, uv: bool = False) -> subprocess.CompletedProcess[str]:
    """`./dev setup` in a folder where pip, or uv, ends with this code."""
    shutil.copy(ROOT / "dev", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(code=code, real=sys.executable), encoding="utf-8")
    python.chmod(0o755)
    folders = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "uv").exists()]
    if uv:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "uv").write_text(UV.format(code=code), encoding="utf-8")
        (tmp_path / "bin" / "uv").chmod(0o755)
        folders.insert(0, str(tmp_path / "bin"))
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    return subprocess.run([tmp_path / "dev", "setup"], env=environment, capture_output=True, text=True, timeout=60)


def test_pip_is_quiet_when_all_goes_well(tmp_path: Path) -> None:
    done = setup(tmp_path, 0)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout == "== Installing shaderlm[dev] into .venv\nAn Adapter (software, Vulkan)\n"


def test_uv_installs_where_there_is_one(tmp_path: Path) -> None:
    done = setup(tmp_path, 0, uv=True)
    assert done.returncode == 0
    assert "pip install --quiet --python" in (tmp_path / "uv.log").read_text()
    assert (tmp_path / ".venv" / ".installed").read_text().endswith(" dev\n")


def test_what_pip_says_is_shown_when_it_fails(tmp_path: Path) -> None:
    done = setup(tmp_path, 3)
    assert done.returncode == 3
    assert done.stderr.startswith("pip says a lot\npip warns\ndev: pip could not install what pyproject.toml names")
    assert "a package index that pip is configured for" in done.stderr
    assert not (tmp_path / ".venv" / ".installed").exists(), "the next run tries again"


def test_the_installer_that_fails_is_named(tmp_path: Path) -> None:
    done = setup(tmp_path, 3, uv=True)
    assert (done.returncode, "dev: uv could not install" in done.stderr) == (3, True)
    assert "a package index that uv is configured for" in done.stderr


SHADERLM = """#!/bin/sh
echo "An answer"
"""


@pytest.mark.parametrize(("code", "status"), [(3, 0), (5, 5)])
def test_a_demo_without_an_adapter_says_once_what_did_not_run(tmp_path: Path, code: int, status: int) -> None:
    """The answer is there, so it is no error; a probe that fails in another way is one."""
    shutil.copy(ROOT / "dev", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    text = PYTHON.format(code=0, real=sys.executable)
    found = 'echo "An Adapter (software, Vulkan)"'
    assert found in text
    scripts = {"python": text.replace(found, f"echo none >&2; exit {code}"), "shaderlm": SHADERLM}
    scripts["ldconfig"] = "#!/bin/sh\necho libvulkan.so\n"  # a loader without a driver: nothing is installed
    for name, script in scripts.items():
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    folders = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "uv").exists()]
    environment = {**os.environ, "PATH": os.pathsep.join([str(folder), *folders])}
    done = subprocess.run([tmp_path / "dev", "demo"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    assert 'generate "Why is the sky blue?" -n 64 --verbose\nAn answer\n' in done.stdout
    if status == 0:
        assert done.stdout.endswith("An answer\n== The CPU answered. The WGSL kernels did not run: none\n")
        assert done.stderr.startswith("To run them, install one of these, then run this again:\n  any GPU")
    else:
        assert done.stderr == "none\ndev: python -m shaderlm.gpu.probe ended with status 5; expected 0 or 3.\n"


INTERRUPTED_PYTHON = """#!/bin/sh
case "$*" in
  *"-m venv"*) echo Traceback >&2; kill -INT $$ ;;
  *) exec "{real}" "$@" ;;
esac
"""


def test_ctrl_c_while_the_environment_is_made_prints_nothing(tmp_path: Path) -> None:
    """Python would print the traceback of venv. The next run begins again."""
    shutil.copy(ROOT / "dev", tmp_path)
    (tmp_path / "python").write_text(INTERRUPTED_PYTHON.format(real=sys.executable), encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    folders = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "uv").exists()]
    environment = {**os.environ, "PATH": os.pathsep.join(folders), "PYTHON": str(tmp_path / "python")}
    done = subprocess.run(
        [tmp_path / "dev", "setup"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    assert (done.returncode, done.stderr) == (130, "")
    assert (tmp_path / ".venv" / ".unfinished").exists()


# apt-get as it is in a fresh Debian: it knows no package before an update, and one at a time may update.
APT_GET = """#!/bin/sh
case "$*" in
  *update*)
    mkdir lock 2>/dev/null || { echo "could not get lock"; exit 100; }
    sleep 0.5
    touch lists
    rmdir lock ;;
  *-venv*) test -e lists && touch ensurepip ;;
  *--simulate*) exit 1 ;;
  *) test -e lists && touch driver ;;
esac
"""
BARE_PYTHON = """#!/bin/sh
case "$*" in
  *ensurepip*) test -e ensurepip ;;
  *"-m venv"*) exit 7 ;;
  *) exec "{real}" "$@" ;;
esac
"""


@pytest.mark.skipif(sys.platform != "linux", reason="apt")
def test_the_demo_of_a_fresh_debian_runs_apt_get_once_at_a_time(tmp_path: Path) -> None:
    shutil.copy(ROOT / "dev", tmp_path)
    (tmp_path / "bin").mkdir()
    scripts = {"apt-get": APT_GET, "python": BARE_PYTHON.format(real=sys.executable)}
    scripts |= {"ldconfig": "#!/bin/sh\n", "id": "#!/bin/sh\necho 0\n"}
    for name, text in scripts.items():
        (tmp_path / "bin" / name).write_text(text, encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    folders = [each for each in os.environ["PATH"].split(os.pathsep) if not (Path(each) / "uv").exists()]
    environment = {**os.environ, "PATH": os.pathsep.join([str(tmp_path / "bin"), *folders])}
    environment |= {"PYTHON": str(tmp_path / "bin" / "python"), "TMPDIR": str(tmp_path)}
    before = {each.name for each in tmp_path.iterdir()}
    done = subprocess.run([tmp_path / "dev", "demo"], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, ""), "as far as venv"
    assert {each.name for each in tmp_path.iterdir()} - before == {".venv", "lists", "ensurepip", "driver"}


def test_help_names_every_option_of_the_tests() -> None:
    done = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for option in ("--full", "--all", "--backend", "--browser"):
        assert option in done.stdout


def test_workers_see_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """pytest-xdist adds a test's group to its name. With a pytest that it does not know, every test is for itself."""
    worker = getattr(request.config, "workerinput", None)
    if worker is not None and "loadgroup" in worker["mainargv"]:
        reason = "this pytest ignores the groups of pytest-xdist; `./dev setup` installs one that does not"
        assert request.node.nodeid.endswith("@test_dev"), reason
