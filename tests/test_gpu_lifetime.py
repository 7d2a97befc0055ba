"""The bindings of wgpu-native, and devices that are closed or lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from shaderlm import gpu
from shaderlm.engine import load
from shaderlm.errors import DeviceError
from shaderlm.gpu import Device, adapters, begin_opening, open_device
from shaderlm.gpu.adapters import choose
from shaderlm.gpu.wgpu_native import declarations, generate, library
from shaderlm.gpu.wgpu_native.bindings import ffi

from .gpu_programs import adding, number, program, uses
from .policies import with_policy
from .tiny_models import write_tiny_llama

SOURCE = Path(gpu.__file__).parent.parent


@pytest.fixture
def own(pytestconfig: pytest.Config) -> Iterator[Device]:
    """A device of the test's own, to close or to lose."""
    with Device(choose(pytestconfig.getoption("--device"))) as device:
        yield device


def lose(device: Device) -> None:
    """Take the GPU away behind the device's back: the library finds out by itself, and says so."""
    native = cast("Any", device._native)
    native.lib.wgpuDeviceDestroy(native.handle)
    if device.caps.implementation == "wgpu":
        native._poll(native.handle, True, ffi.NULL)


# Bindings ---------------------------------------------------------------------------------------------------------


def test_bindings_are_those_of_the_declarations() -> None:
    path = Path(generate.HERE) / "bindings.py"
    assert path.read_text(encoding="utf-8") == generate.bindings(), f"run python -m {generate.__name__}"


def _form(ffi: Any, kind: Any) -> tuple[Any, ...]:
    """What a caller must agree on: a number's size and sign, a struct's size, or that it is a pointer."""
    if kind.kind in ("pointer", "function"):
        return ("pointer",)
    if kind.kind in ("struct", "union", "void"):
        return (kind.kind, ffi.sizeof(kind) if kind.kind != "void" else 0)
    signed = kind.kind != "enum" and "u" not in kind.cname.split("_")[0] and kind.cname != "size_t"
    return ("number", ffi.sizeof(kind), kind.cname if kind.cname in ("float", "double") else signed)


def test_declarations_are_those_of_the_whole_header() -> None:
    """Sizes, offsets and numbers as the package wgpu declares them."""
    from wgpu._coreutils import get_header_filename
    from wgpu.backends.wgpu_native import ffi as whole
    from wgpu.backends.wgpu_native import lib

    for name in declarations.STRUCTS.keys() - {"NativeDisplayHandle", "XlibDisplayHandle"}:
        ours, theirs = ffi.typeof(f"WGPU{name}"), whole.typeof(f"WGPU{name}")
        assert ffi.sizeof(ours) == whole.sizeof(theirs), name
        pairs = list(zip(ours.fields, theirs.fields, strict=True))
        assert [(n, f.offset) for (n, f), _ in pairs] == [(n, f.offset) for _, (n, f) in pairs], name
        for (field, mine), (_, other) in pairs:
            assert _form(ffi, mine.type) == _form(whole, other.type), f"{name}.{field}"
    for name, arguments in declarations.CALLBACKS.items():
        theirs = whole.typeof(f"WGPU{name}")
        ours = ffi.typeof(f"WGPU{name}")
        assert [_form(ffi, a) for a in ours.args] == [_form(whole, a) for a in theirs.args], name
        assert len(arguments) == len(theirs.args), name
    for name, numbers in declarations.ENUMS.items():
        for member, value in declarations.members(name, numbers).items():
            assert getattr(lib, member) == value, member
    header = Path(get_header_filename("combined_header.h")).read_text(encoding="utf-8")
    for name, numbers in declarations.FLAGS.items():
        for member, number_ in declarations.members(name, numbers).items():
            (text,) = re.findall(rf"static const \w+ {member} = ([^;]+);", header)
            left, _, right = text.partition("<<")
            assert number_ == int(left, 0) << int(right or "0"), member
    for name in declarations.FUNCTIONS:
        ours, theirs = ffi.typeof(getattr(library.library(), f"wgpu{name}")), whole.typeof(getattr(lib, f"wgpu{name}"))
        both = [[_form(f, kind) for kind in (t.result, *t.args)] for f, t in ((ffi, ours), (whole, theirs))]
        assert both[0] == both[1], name
    assert (len(declarations.STRUCTS) > 25, len(declarations.FUNCTIONS) > 50) == (True, True)


def test_nothing_of_the_header_is_copied() -> None:
    assert not [path for path in SOURCE.rglob("*") if path.suffix in (".h", ".hpp", ".c")]


def test_nothing_else_touches_the_implementation() -> None:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(import|from)\s+wgpu\b", text), path
        assert not re.search(r"(import|from)\s+wgpudawn\b", text), path
        if path.parent.name not in ("wgpu_native", "dawn") and path.name != "webgpu_h.py":
            assert not re.search(r"\bffi\b|wgpu[A-Z]|_cffi_backend", text), path
            if path.parent.name != "gpu":
                assert not re.search(r"wgpu_native|webgpu_h|gpu\.dawn|gpu import.*\bdawn\b", text), path


@pytest.mark.parametrize(
    ("given", "said"),
    [("/nowhere/libwgpu.so", "cannot be loaded"), ("libc.so.6", "cannot be loaded.*wgpuGetVersion")],
)
def test_a_library_that_is_not_the_right_one(given: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPU_LIB_PATH", given)
    with pytest.raises(DeviceError, match=rf"{said}.*pip install 'wgpu"):
        library._load()


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", 30)
    with pytest.raises(DeviceError, match=r"is wgpu-native 29, shaderlm needs 30"):
        library._load()


LOOKING = """
import os, sys
before = dict(os.environ)
from shaderlm.gpu import adapters, open_device
names = [adapter.caps.name for adapter in adapters()]
open_device(0)
print(dict(os.environ) == before, "wgpu" in sys.modules, "cffi" in sys.modules, len(names) > 0)
"""


@pytest.mark.parametrize("chosen", [None, ""])
def test_looking_for_adapters_leaves_nothing_behind(chosen: str | None) -> None:
    """Neither in the environment nor in a package of somebody else."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VK_")}
    if chosen is not None:
        environment["VK_ADD_DRIVER_FILES"] = chosen
    done = subprocess.run(
        [sys.executable, "-c", LOOKING], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.split() == ["True", "False", "False", "True"]


AT_ONCE = """
import threading
from shaderlm.gpu import adapters
def look():
    for _ in range(6):
        adapters()  # and forget them
threads = [threading.Thread(target=look) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(adapters()))
"""


def test_several_threads_may_look_for_adapters() -> None:
    """The library aborts the process where an adapter of OpenGL is released while another thread uses OpenGL."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, int(done.stdout or 0) > 0) == (0, True), done.stderr


# Closed and lost --------------------------------------------------------------------------------------------------


def test_a_closed_device_says_so(own: Device) -> None:
    every = uses(own)
    own.close()
    own.close()
    assert not own.usable
    for name, use in every.items():
        with pytest.raises(DeviceError, match=r"closed|recorded ahead"):
            pytest.fail(f"{name}: {use()}")


def test_a_lost_device_says_so_and_is_closed_in_peace(own: Device) -> None:
    every = uses(own)
    assert own.usable
    lose(own)
    for name, use in every.items():
        with pytest.raises(DeviceError, match=r"^the GPU was lost: .+; load the model again$"):
            pytest.fail(f"{name}: {use()}")
    assert not own.usable
    own.close()


def test_a_loss_that_nobody_was_told_of(own: Device) -> None:
    """The library refuses a call before it says that the device is lost."""
    native, bound = cast("Any", own._native), own.bind(program(adding("untold")))
    native.lib.wgpuDeviceDestroy(native.handle)
    with pytest.raises(DeviceError, match="lost"):
        own.submit([bound])


def test_a_result_under_way_when_the_device_is_lost(own: Device) -> None:
    bound = own.bind(program(adding("under way")))
    pending = own.submit([bound], (bound.buffers["out"], 16))
    assert pending is not None
    cast("Any", own._native).state.lost = "out of order"  # what the library's callback does
    with pytest.raises(DeviceError, match=r"did not come back from the GPU: the GPU was lost: out of order; load"):
        pending.wait()


def test_the_next_load_survives_a_loss(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """A model on the shared device; the device is lost; the same call gives a model that answers as before."""
    spec = pytestconfig.getoption("--device") or device.caps.name
    monkeypatch.setattr(sys.modules[open_device.__module__], "_open", {})
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    first = load(path, device=spec)
    expected = first.generate([5], max_tokens=5, ignore_eos=True)
    lost = open_device(spec)
    lose(lost)
    with pytest.raises(DeviceError, match=r"the GPU was lost: .*load the model again"):
        first.generate([5], max_tokens=5, ignore_eos=True)
    first.close()
    with load(path, device=spec) as second:
        assert second.generate([5], max_tokens=5, ignore_eos=True) == expected
    assert open_device(spec) is not lost
    open_device(spec).close()
    assert open_device(spec).usable
    open_device(spec).close()


def test_a_closed_device_gives_its_threads_back(own: Device) -> None:
    own.caps = with_policy(own.caps, record_ahead=True)
    bound = own.bind(program(adding("threads")))
    pool = own.command_pool([bound], (bound.buffers["out"], 4))
    assert pool is not None
    assert number(own.submit_from(pool)) == 1.0
    own.close()
    assert pool.closed


# Forks -----------------------------------------------------------------------------------------------------------


def in_fork(work: Callable[[], object]) -> str:
    """What the work raises in a fork of this process. A fork that hangs is ended."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of processes that have threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            said = f"returned {work()!r}"
        except BaseException as problem:
            said = f"{type(problem).__name__}: {problem}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read, encoding="utf-8") as said_by_child:
        text = said_by_child.read()
    assert os.waitpid(child, 0)[1] == 0, "the fork hangs"
    return text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_a_fork_has_no_device(own: Device, tmp_path: Path) -> None:
    refused = "DeviceError: this process is a fork of one that started GPU drivers"
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    with load(path, device=own) as model:
        before = model.generate("the", max_tokens=3)
        text = str(before)
        assert in_fork(lambda: model.generate("the", max_tokens=3)).startswith(refused)
        assert in_fork(model.close) == "returned None"
        assert in_fork(lambda: load(path, device=own)).startswith(refused)
        assert in_fork(lambda: load(path, device=own.caps.name)).startswith(refused)
        assert in_fork(lambda: load(path, backend=own.caps.implementation)).startswith(refused)
        assert in_fork(lambda: load(path, device="numpy").generate("the", max_tokens=3)[:]) == f"returned {text!r}"
        assert in_fork(adapters).startswith(refused)
        assert in_fork(own.close) == "returned None"
        assert model.generate("the", max_tokens=3) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_a_fork_begins_to_open_nothing(own: Device) -> None:
    """The thread that did it would wait for ever, and the end of the process for that thread."""

    def threads_of_opening() -> int:
        before = threading.active_count()
        begin_opening("no such adapter")
        return threading.active_count() - before

    assert in_fork(threads_of_opening) == "returned 0"


FORKED = """
import os, signal, sys, warnings
from shaderlm.gpu import Device
from shaderlm.gpu.adapters import choose
from tests.gpu_programs import adding, program
device = Device(choose(sys.argv[1], sys.argv[2]))
device.run(program(adding("before the fork")))
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    signal.alarm(30)
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX")
def test_a_fork_ends(own: Device) -> None:
    """It gives back nothing of the device: drivers would wait for threads that it does not have."""
    command = [sys.executable, "-c", FORKED, own.caps.name, own.caps.implementation]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=SOURCE.parent.parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")
