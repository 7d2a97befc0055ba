"""LLVM IR → machine code for this processor, which is kept on disk: compiling takes a second, loading milliseconds."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import DeviceError, ModelError
from ...files import atomic_write, cache_directory
from ...gpu.packages import version_of
from ...graph import batch, reference
from ...version import __version__

_lock, _host_lock = threading.Lock(), threading.Lock()
_DIGEST = 32
_OLDEST = (0, 50)  # of llvmlite


def _renew_locks() -> None:
    global _lock, _host_lock
    _lock, _host_lock = threading.Lock(), threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread of the parent may hold them
    os.register_at_fork(after_in_child=_renew_locks)


def is_available() -> bool:
    """Is llvmlite installed, and new enough? It is not imported."""
    version = version_of("llvmlite")
    return (
        version is not None
        and tuple(int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]) >= _OLDEST
    )


class Host:
    """The processor, and the code that was loaded for it."""

    def __init__(self) -> None:
        try:
            from llvmlite import __version__ as version
            from llvmlite import binding
        except (ImportError, OSError) as problem:
            what_to_do = 'install it again, or take device="numpy"'
            raise DeviceError(f"llvmlite cannot be imported ({problem}): {what_to_do}") from None
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        self._llvm: Any = binding
        self.cpu = binding.get_host_cpu_name()
        found = binding.get_host_cpu_features()
        self.features = frozenset(name for name, there in found.items() if there)
        if "sse2" in self.features and "f16c" not in self.features:
            raise DeviceError('this processor cannot convert f16 (it has no F16C): take device="numpy"')
        self._flags = found.flatten()
        if "avx512vnni" in self.features:  # else LLVM takes two instructions for vpdpwssd, for its latency
            self._flags += ",+fast-dpwssd"
        self._about = (self.cpu, self._flags, binding.get_default_triple(), version, _sources())
        self._engines: list[Any] = []
        self._addresses: dict[str, int] = {}

    def address(self, name: str, write: Callable[..., str], *how: Any) -> int:
        """Where the function `name` of the module write(*how) lies. What is kept of it is found without writing it."""
        about = repr((name, write.__qualname__, how))
        with _lock:
            if about not in self._addresses:
                key = "\0".join((about, *self._about)).encode()
                self._addresses[about] = self._load(name, hashlib.sha256(key).hexdigest(), lambda: write(*how))
            return self._addresses[about]

    def _load(self, name: str, key: str, write: Callable[[], str]) -> int:
        data = _read(key)
        if data is None:
            data = self.compile(write())
            _keep(key, data)
        # An engine for each: two modules may have functions of the same name. Code lives as long as its engine.
        engine = self._llvm.create_mcjit_compiler(self._llvm.parse_assembly(""), self._machine())
        engine.add_object_file(self._llvm.object_file.ObjectFileRef.from_data(data))
        engine.finalize_object()
        self._engines.append(engine)
        return int(engine.get_function_address(name))

    def _machine(self) -> Any:
        target = self._llvm.Target.from_default_triple()
        return target.create_target_machine(cpu=self.cpu, features=self._flags, opt=3, reloc="default", jit=True)

    def compile(self, text: str) -> bytes:
        """The object code of a module."""
        llvm, machine = self._llvm, self._machine()
        module = llvm.parse_assembly(text)
        module.triple, module.data_layout = llvm.get_default_triple(), str(machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = False  # vectors are written as such
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        data: bytes = machine.emit_object(module)
        return data


@functools.cache
def _sources() -> str:
    """Changes whenever the code does that writes the modules: of this package, and what it takes numbers from."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    numbers = [Path(str(module.__file__)) for module in (batch, reference)]
    texts = [each.read_bytes() for each in (*files, *numbers) if each.exists()]
    return hashlib.sha256(b"\0".join([__version__.encode(), *texts])).hexdigest()


_host: Host | None = None


def host() -> Host:
    """Of this process: code lives as long as it does."""
    global _host
    with _host_lock:
        if _host is None:
            _host = Host()
        return _host


def _is_own(path: Path) -> bool:
    """Can nobody else write there? What lies there is run."""
    if not hasattr(os, "getuid"):
        return True
    found = path.lstat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _read(key: str) -> bytes | None:
    """What was kept, if it is whole: its hash comes first."""
    try:
        path = cache_directory() / "cpu" / key
        if not (_is_own(path.parent) and _is_own(path)):
            return None
        data = path.read_bytes()
    except (OSError, ModelError):
        return None
    code = data[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == data[:_DIGEST] else None


def _keep(key: str, code: bytes) -> None:
    """For the next start; where nothing can be written, it compiles again."""
    with suppress(OSError, ModelError):
        path = cache_directory() / "cpu" / key
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if _is_own(path.parent):
            with atomic_write(path, private=True) as file:
                file.write(hashlib.sha256(code).digest() + code)
