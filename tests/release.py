"""`./dev release`: builds what is published from the last commit, checks it, and puts it into dist/.

    shaderlm-VERSION.tar.gz, shaderlm-VERSION-py3-none-any.whl, shaderlm-VERSION.tgz (npm: shaderlm.js)
    shaderlm-VERSION.cdx.json   bill of materials (CycloneDX): what `pip install` brings here, with licences
    SHA256SUMS

Everything is built twice, the second time as another user would, and the bytes must be equal. The time in archives is
that of the commit. dist/ changes only if all checks pass. What could not be checked is said at the end.
Only the standard library is needed; a network is, for the packages of clean environments.
"""

from __future__ import annotations

import argparse
import email
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import tomllib
import uuid
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).parent.parent
ASSETS = "src/shaderlm/web/assets/"
PYTHONS = tuple(f"3.{minor}" for minor in range(11, 15))
LIMIT = 900  # seconds of one command
# Commands of the README that time a GPU: without one they take hours, or refuse.
NEED_A_GPU = {"bench", "tune", "profile"}


class ReleaseError(Exception):
    """A check that fails, in one line."""


def say(text: str) -> None:
    """A step, at once."""
    print(f"== {text}", flush=True)


def run(command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """What a command prints; ReleaseError with its last lines if it fails."""
    shown = shlex.join(map(str, command))
    try:
        done = subprocess.run(
            [*map(str, command)],
            cwd=cwd,
            env=None if environment is None else dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise ReleaseError(f"{shown} did not end within {LIMIT} s") from None
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ReleaseError(f"{shown} ends with {done.returncode}:\n{end}")
    return done.stdout


# Sources ---------------------------------------------------------------------------------------------------


def export(root: Path, folder: Path) -> int:
    """The files of the last commit, without anything else of the working tree; the time of the commit."""
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        unpack(files, folder)
    return int(run(["git", "log", "-1", "--format=%ct"], root))


def unpack(files: tarfile.TarFile, folder: Path) -> None:
    """All files of an archive. `extractall` has no argument `filter` before Python 3.11.4, which Debian 12 has not."""
    files.extraction_filter = getattr(tarfile, "data_filter", None)
    files.extractall(folder)


def files_below(folder: Path) -> set[str]:
    """Names of all files, relative to the folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() or path.is_symlink()}


def manifest(source: Path) -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))


def version_of(source: Path) -> str:
    """The version that the package has."""
    found = re.search(
        r'"(.+)"', (source / "src/shaderlm/version.py").read_text(encoding="utf-8").split("__version__")[1]
    )
    assert found
    return found[1]


def check_version(source: Path) -> str:
    """The version, which the changelog and the citation have, too, with one date."""
    version = version_of(source)
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ReleaseError(
            f"the version {version} is none to publish; expected one such as 0.1.0 in src/shaderlm/version.py"
        )
    changes = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    title = re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", changes, re.M)
    if title is None:
        raise ReleaseError(f"CHANGELOG.md has no section [{version}] with a date, such as: ## [{version}] - 2026-01-31")
    citation = (source / "CITATION.cff").read_text(encoding="utf-8")
    for line in (f"version: {version}", f"date-released: {title[1]}"):
        if line not in citation.splitlines():
            raise ReleaseError(f"CITATION.cff does not say {line}")
    return version


# Building --------------------------------------------------------------------------------------------------


def npm_manifest(source: Path, names: Iterable[str]) -> dict[str, Any]:
    """package.json of shaderlm.js."""
    project = manifest(source)["project"]
    return {
        "name": "shaderlm",
        "version": version_of(source),
        "description": "Runs language models that `shaderlm export-web` wrote, in browsers and Node, through WebGPU",
        "license": project["license"],
        "author": project["authors"][0]["name"],
        "keywords": project["keywords"],
        "type": "module",
        "exports": {".": {"types": "./shaderlm.d.ts", "default": "./shaderlm.js"}},
        "types": "./shaderlm.d.ts",
        "files": sorted(names),
        "sideEffects": False,
    }


NPM_README = """\
# shaderlm.js

Runs language models in browsers and Node, through WebGPU. `shaderlm export-web MODEL DIR`, a command of the Python
package shaderlm, writes a model as a folder of static files. This package loads such a folder:

```js
import { load } from "shaderlm";

const model = await load("./smollm2/");
const messages = [{ role: "user", content: "What is gravity?" }];
for await (const text of model.chat(messages, { max_tokens: 64 })) console.log(text);
```

Use the version of `shaderlm.js` that wrote the folder: an export has a copy of it, too.
"""


def npm_package(source: Path, target: Path, seconds: int) -> Path:
    """The npm package: the script with what it imports, types and licences. The same bytes as often as it is made."""
    assets = {name: (source / ASSETS / name).read_bytes() for name in files_below(source / ASSETS)}
    files = {**assets, "LICENSE": (source / "LICENSE").read_bytes(), "README.md": NPM_README.encode()}
    files["package.json"] = (json.dumps(npm_manifest(source, assets), indent=2) + "\n").encode()
    package = target / f"shaderlm-{version_of(source)}.tgz"
    with (
        package.open("wb") as out,
        gzip.GzipFile("", "wb", fileobj=out, mtime=seconds) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, data in sorted(files.items()):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size, entry.mtime, entry.mode = len(data), seconds, 0o644
            archive.addfile(entry, io.BytesIO(data))
    return package


def build(
    python: Path, source: Path, target: Path, seconds: int, *kinds: str, variables: Mapping[str, str] = os.environ
) -> list[Path]:
    """What hatchling builds of a folder with sources: these kinds, or all. It is in the environment of `python`."""
    environment = {**variables, "SOURCE_DATE_EPOCH": str(seconds), "PYTHONPATH": ""}
    chosen = [word for kind in kinds for word in ("-t", kind)]
    run([python, "-m", "hatchling", "build", "-d", target, *chosen], source, environment)
    return sorted(target.iterdir())


def build_elsewhere(python: Path, root: Path, folder: Path, seconds: int) -> list[Path]:
    """All of it as another user has it: another folder, time zone, language, order of sets, and rights of new files."""
    variables = {**os.environ, "TZ": "Asia/Kathmandu", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    before = os.umask(0o077)
    try:
        (folder / "source").mkdir(parents=True)
        export(root, folder / "source")
        built = build(python, folder / "source", folder / "dist", seconds, variables=variables)
        return [*built, npm_package(folder / "source", folder / "dist", seconds)]
    finally:
        os.umask(before)


def check_equal(first: Iterable[Path], second: Iterable[Path]) -> None:
    """The same names and bytes."""
    both = [{path.name: path.read_bytes() for path in paths} for paths in (first, second)]
    different = [name for name in sorted(both[0] | both[1]) if both[0].get(name) != both[1].get(name)]
    if different:
        raise ReleaseError(f"built twice, these differ: {', '.join(different)}")


# Contents --------------------------------------------------------------------------------------------------


def _same(what: str, found: set[str], expected: set[str]) -> None:
    wrong = [f"{name} is missing" for name in sorted(expected - found)]
    wrong += [f"{name} does not belong there" for name in sorted(found - expected)]
    if wrong:
        raise ReleaseError(f"{what}: {'; '.join(wrong[:10])}{'; …' if len(wrong) > 10 else ''}")


def check_wheel(wheel: Path, source: Path) -> None:
    """Every file of the package and nothing else; licence, version, types and the command."""
    version = version_of(source)
    info = f"shaderlm-{version}.dist-info"
    package = {f"shaderlm/{name}" for name in files_below(source / "src/shaderlm")}
    own = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    with zipfile.ZipFile(wheel) as files:
        _same(wheel.name, set(files.namelist()), package | own)
        metadata = email.message_from_bytes(files.read(f"{info}/METADATA"))
        licence = files.read(f"{info}/licenses/LICENSE")
    if licence != (source / "LICENSE").read_bytes():
        raise ReleaseError(f"{wheel.name}: the licence is not LICENSE")
    project = manifest(source)["project"]
    expected = {"Name": project["name"], "Version": version, "License-Expression": project["license"]}
    expected |= {"License-File": "LICENSE", "Requires-Python": project["requires-python"]}
    for key, value in expected.items():
        if metadata[key] != value:
            raise ReleaseError(f"{wheel.name}: {key} is {metadata[key]!r}, expected {value!r}")
    if "shaderlm/py.typed" not in package:
        raise ReleaseError("the package has no py.typed, so that its types are not seen")
    check_addresses(project.get("urls", {}), metadata.get_all("Project-URL") or [])


def check_addresses(addresses: Mapping[str, str], written: Iterable[str]) -> None:
    """[project.urls] of pyproject.toml is in the metadata, and is no placeholder."""
    expected = {f"{name}, {address}" for name, address in addresses.items()}
    _same("Project-URL", set(written), expected)
    for name, address in addresses.items():
        place = urlsplit(address)
        if place.scheme != "https" or "." not in place.netloc or re.search(r"example|localhost", place.netloc):
            raise ReleaseError(f"[project.urls]: {name} must be a public https address, got {address}")


def check_sdist(sdist: Path, source: Path) -> None:
    """All files of the commit, so that it can be built, tested and read, and nothing else."""
    folder = f"shaderlm-{version_of(source)}/"
    with tarfile.open(sdist) as files:
        _same(sdist.name, {name.removeprefix(folder) for name in files.getnames()}, files_below(source) | {"PKG-INFO"})


def check_npm(package: Path) -> list[str]:
    """The script, what it imports and its types; npm installs it and Node imports it. What could not be checked."""
    with tarfile.open(package) as files:
        names = set(files.getnames())
        texts = {
            name: read.read().decode() for name in names if name.endswith(".js") and (read := files.extractfile(name))
        }
    for name in ("package.json", "shaderlm.js", "shaderlm.d.ts", "LICENSE", "README.md"):
        if f"package/{name}" not in names:
            raise ReleaseError(f"{package.name}: {name} is missing")
    for name, text in texts.items():
        for imported in re.findall(r'(?:from|import)\s*\(?\s*["\']\./([\w.-]+)["\']', text):
            if f"package/{imported}" not in names:
                raise ReleaseError(f"{package.name}: {name} imports {imported}, which is not there")
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return ["the npm package was not installed: there is no Node with npm"]
    with tempfile.TemporaryDirectory() as folder:
        run(
            [npm, "install", "--offline", "--no-audit", "--no-fund", "--prefix", folder, package.absolute()],
            Path(folder),
        )
        code = 'import * as shaderlm from "shaderlm"; console.log(typeof shaderlm.load)'
        printed = run([node, "--input-type=module", "-e", code], Path(folder)).strip()
        if printed != "function":
            raise ReleaseError(f"{package.name}: load is {printed} in Node, expected a function")
    return []


# Clean environments ----------------------------------------------------------------------------------------


def find_python(version: str) -> str | None:
    """An interpreter of this version: on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
    for candidate in candidates:
        with suppress(OSError, subprocess.SubprocessError):
            code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([str(candidate), "-c", code], capture_output=True, text=True, timeout=60)
            if done.stdout.strip() == version:
                return str(candidate)
    return None


def make_environment(python: str, folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    run([python, "-m", "venv", folder], folder.parent)
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def clean(folder: Path) -> dict[str, str]:
    """Variables for a clean environment: nothing of this tree, and no options of the user. Downloads are shared."""
    others = ("PYTHON", "VIRTUAL_ENV", "SHADERLM_")
    names = {n: value for n, value in os.environ.items() if not n.startswith(others) or n == "SHADERLM_CACHE"}
    return names | {"SHADERLM_CONFIG": os.devnull, "SHADERLM_STATE": str(folder / "state"), "PIP_NO_INPUT": "1"}


def pip(python: Path, *arguments: str | Path) -> str:
    """pip in the environment of `python`."""
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return run(command, python.parent, clean(python.parent))


_IMPORT_ALL = """
import importlib, pkgutil, sys, shaderlm
from shaderlm.errors import ShaderlmError
for module in pkgutil.walk_packages(shaderlm.__path__, "shaderlm."):
    try:
        importlib.import_module(module.name)
    except (ImportError, ShaderlmError) as problem:
        lacks = str(getattr(problem, "name", None)).partition(".")[0]
        if lacks not in sys.argv[1:] and "shaderlm[" not in str(problem):
            sys.exit(f"{module.name}: {problem}")
print(shaderlm.__version__)
"""


def import_all(python: Path, extras: Mapping[str, Sequence[str]], folder: Path) -> None:
    """Every module is imported, or lacks a package of an extra, without which its command says what to install."""
    names = {re.split(r"[^\w-]", each)[0].replace("-", "_") for each in chain(*extras.values())} - {"shaderlm"}
    run([python, "-c", _IMPORT_ALL, *sorted(names)], folder, clean(folder))


_LIST = """
import json
from importlib.metadata import distributions
def listed(d):
    m = d.metadata
    classified = [c.rpartition(" :: ")[2] for c in m.get_all("Classifier", ()) if c.startswith("License :: ")]
    file = d.read_text(f"licenses/{m['License-File']}") or ""
    text = m["License-Expression"] or ", ".join(classified) or (m["License"] or file).strip().split("\\n")[0]
    return {"name": m["Name"], "version": d.version, "license": text, "spdx": bool(m["License-Expression"])}
print(json.dumps([listed(d) for d in distributions()]))
"""


def packages(python: Path) -> dict[str, dict[str, Any]]:
    """What is installed, by name: version and licence."""
    listed = json.loads(run([python, "-c", _LIST], python.parent, clean(python.parent)))
    return {each["name"]: each for each in listed if each["name"] not in ("pip", "setuptools", "wheel")}


def bill_of_materials(
    version: str, wheel: Path, needed: Mapping[str, Any], optional: Mapping[str, Any], seconds: int, hatchling: str
) -> dict[str, Any]:
    """CycloneDX 1.6: the wheel, and the packages that it needs or may use, as they were installed for the checks.

    hatchling: its version, with which the same bytes can be built again.
    """

    def component(each: Mapping[str, Any], scope: str) -> dict[str, Any]:
        purl = f"pkg:pypi/{each['name'].lower().replace('_', '-')}@{each['version']}"
        licence = {"expression": each["license"]} if each["spdx"] else {"license": {"name": each["license"]}}
        known = {"type": "library", "bom-ref": purl, "name": each["name"], "version": each["version"]}
        return {**known, "scope": scope, "purl": purl, "licenses": [licence]}

    components = [component(each, "required") for name, each in sorted(needed.items()) if name != "shaderlm"]
    components += [component(each, "optional") for name, each in sorted(optional.items()) if name not in needed]
    unknown = [each["name"] for each in (*needed.values(), *optional.values()) if not each["license"]]
    if unknown:
        raise ReleaseError(f"these packages do not say their licence: {', '.join(sorted(set(unknown)))}")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = component(needed["shaderlm"], "required") | {"hashes": [{"alg": "SHA-256", "content": digest}]}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(seconds, UTC).isoformat(),
            "tools": {"components": [{"type": "application", "name": "hatchling", "version": hatchling}]},
            "component": own,
        },
        "components": components,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}],
    }


# The commands of the README --------------------------------------------------------------------------------


def readme_commands(text: str) -> list[list[str]]:
    """The `shaderlm` commands of its blocks, each once."""
    lines = [
        line
        for block in re.findall(r"^```(?:bash|console)\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
    ]
    words = [
        shlex.split(line.removeprefix("$ "), comments=True) for line in lines if re.match(r"(\$ )?shaderlm ", line)
    ]
    return [each for i, each in enumerate(words) if each not in words[:i]]


def check_readme(python: Path, text: str, folder: Path) -> list[str]:
    """Run them in an empty folder, with the files that they name. What did not run, and why."""
    environment = clean(folder)
    environment["PATH"] = os.pathsep.join([str(python.parent), environment["PATH"]])
    model = run(["shaderlm", "pull", "smollm2-135m"], folder, environment).strip()
    (folder / "model.gguf").symlink_to(model)
    (folder / "notes.txt").write_text("Water boils at 100 degrees.\n", encoding="utf-8")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(request) + "\n", encoding="utf-8")
    code = "import sys; from shaderlm.gpu import adapters; found = adapters(); "
    code += "sys.exit(not found or found[0].caps.software)"
    gpu = subprocess.run([python, "-c", code], env=environment, capture_output=True).returncode == 0
    left_out = []
    for words in readme_commands(text):
        shown = shlex.join(words)
        if words[1] in NEED_A_GPU and not gpu:
            left_out.append(f"not run, there is no GPU: {shown}")
            continue
        if words[1] == "serve":
            _serve([*words, "--port", "0"], folder, environment)
        else:
            run(words, folder, environment)
        print(f"   {shown}", flush=True)
    return left_out


def _serve(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Start the server, and end it with Ctrl-C once it is ready."""
    process = subprocess.Popen(words, cwd=folder, env=dict(environment), stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(LIMIT, process.kill)
    timer.start()
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if " is ready on " in line or "/web/ runs" in line:
            process.send_signal(signal.SIGINT)
    code = process.wait()
    timer.cancel()
    if code not in (0, 130):
        raise ReleaseError(f"{shlex.join(words)} ends with {code}:\n{''.join(said[-20:])}")


# All of it -------------------------------------------------------------------------------------------------


def check_installed(
    version: str, name: str, wheel: Path, extras: Mapping[str, Sequence[str]], readme: str, work: Path
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Install the wheel with this interpreter and use it: packages without extras, with them, and what did not run."""
    folder = work / f"python{version}"
    folder.mkdir()
    python = make_environment(name, folder / "environment")
    pip(python, "install", "--quiet", wheel)
    pip(python, "check")
    import_all(python, extras, folder)
    needed = packages(python)
    pip(python, "install", "--quiet", f"shaderlm[{','.join(extras)}] @ {wheel.as_uri()}")
    pip(python, "check")
    used = folder / "use"
    used.mkdir()
    left_out = check_readme(python, readme, used)
    return needed, packages(python), left_out


def release(root: Path, pythons: Sequence[str]) -> None:
    """Build, check and publish to dist/."""
    if run(["git", "status", "--porcelain"], root).strip():
        say("note: changes that are not committed are not part of the release")
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        (work / "source").mkdir()
        seconds = export(root, work / "source")
        source = work / "source"
        version = check_version(source)
        say(f"Building shaderlm {version} twice")
        python = make_environment(sys.executable, work / "hatchling")
        pip(python, "install", "--quiet", *manifest(source)["build-system"]["requires"])
        built = build(python, source, work / "dist", seconds)
        npm = npm_package(source, work / "dist", seconds)
        check_equal([*built, npm], build_elsewhere(python, root, work / "elsewhere", seconds))
        wheel, sdist = (next(path for path in built if path.name.endswith(end)) for end in (".whl", ".tar.gz"))
        say("Contents, licences and metadata")
        check_wheel(wheel, source)
        check_sdist(sdist, source)
        notes = check_npm(npm)
        project = manifest(source)["project"]
        if not project.get("urls"):
            notes.append("pyproject.toml has no [project.urls]: links of the README lead nowhere on PyPI")
        with tarfile.open(sdist) as files:
            unpack(files, work / "unpacked")
        from_sdist = build(python, work / "unpacked" / f"shaderlm-{version}", work / "third", seconds, "wheel")
        check_equal([wheel], from_sdist)
        readme = (source / "README.md").read_text(encoding="utf-8")
        extras = {name: each for name, each in sorted(project["optional-dependencies"].items()) if name != "dev"}
        bills = []
        for each in pythons:
            interpreter = find_python(each)
            if interpreter is None:
                notes.append(f"not run: Python {each}, there is no interpreter")
                continue
            say(f"Python {each}: a clean environment, imports without extras, the README's commands")
            needed, used, left_out = check_installed(each, interpreter, wheel, extras, readme, work)
            bills.append((needed, used))
            notes += left_out
        if not bills:
            raise ReleaseError(f"there is no interpreter of {', '.join(pythons)} to install the wheel with")
        tool = packages(python)["hatchling"]["version"]
        bill = bill_of_materials(version, wheel, *bills[0], seconds, tool)
        (work / "dist" / f"shaderlm-{version}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
        written = sorted((work / "dist").iterdir())
        sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in written)
        (work / "dist" / "SHA256SUMS").write_text(sums, encoding="utf-8")
        shutil.rmtree(root / "dist", ignore_errors=True)
        shutil.copytree(work / "dist", root / "dist")
        say("dist/ has")
        print(sums, end="")
        for note in dict.fromkeys(notes):
            say(f"note: {note}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="./dev release", description="Build and check what is published, into dist/.")
    parser.add_argument("--python", action="append", metavar="3.N", help=f"instead of {', '.join(PYTHONS)}; repeatable")
    options = parser.parse_args()
    try:
        release(ROOT, options.python or PYTHONS)
    except ReleaseError as problem:
        sys.exit(f"dev: {problem}")


if __name__ == "__main__":
    main()
