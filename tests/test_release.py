"""What `./dev release` checks: wrong archives are refused, and the tree is ready to be released."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # of schemathesis, an extra of `dev`

from . import release
from .release import ReleaseError

ROOT = release.ROOT
METADATA = """\
Metadata-Version: 2.4
Name: shaderlm
Version: {version}
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small tree with what the checks read."""
    tree = tmp_path / "tree"
    (tree / "src/shaderlm/kernels").mkdir(parents=True)
    (tree / release.ASSETS).mkdir(parents=True)
    for name in ("LICENSE", "README.md", "pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tree)
    released = re.search(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    assert released
    title = f"## [{release.version_of(ROOT)}] - {released[1]}\n"
    (tree / "CHANGELOG.md").write_text(f"# Changelog\n\n{title}", encoding="utf-8")
    shutil.copy(ROOT / "src/shaderlm/version.py", tree / "src/shaderlm")
    for name in ("py.typed", "kernels/a.wgsl"):
        (tree / "src/shaderlm" / name).touch()
    (tree / release.ASSETS / "shaderlm.js").write_text('import { x } from "./text.js";\n')
    (tree / release.ASSETS / "text.js").write_text("export const x = 1;\n")
    (tree / release.ASSETS / "shaderlm.d.ts").touch()
    return tree


def wheel(source: Path, target: Path, change: Callable[[dict[str, bytes]], object] = lambda _: None) -> Path:
    """A wheel of the tree, after a change of its files."""
    version = release.version_of(source)
    info = f"shaderlm-{version}.dist-info"
    files = {
        f"shaderlm/{n}": (source / "src/shaderlm" / n).read_bytes()
        for n in release.files_below(source / "src/shaderlm")
    }
    files |= {f"{info}/{name}": b"" for name in ("WHEEL", "RECORD", "entry_points.txt")}
    files[f"{info}/METADATA"] = METADATA.format(version=version).encode()
    files[f"{info}/licenses/LICENSE"] = (source / "LICENSE").read_bytes()
    change(files)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return target


def _other_version(files: dict[str, bytes]) -> None:
    name = next(name for name in files if name.endswith("METADATA"))
    files[name] = METADATA.format(version="9").encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.pop("shaderlm/kernels/a.wgsl"), "shaderlm/kernels/a.wgsl is missing"),
        (lambda files: files.update({"tests/test_a.py": b""}), "tests/test_a.py does not belong there"),
        (lambda files: files.update({"shaderlm/__pycache__/a.pyc": b""}), "a.pyc does not belong there"),
        (_other_version, "Version is '9', expected '0"),
    ],
)
def test_a_wrong_wheel_is_refused(
    source: Path, tmp_path: Path, change: Callable[[dict[str, bytes]], object], said: str
) -> None:
    release.check_wheel(wheel(source, tmp_path / "right.whl"), source)
    with pytest.raises(ReleaseError, match=re.escape(said)):
        release.check_wheel(wheel(source, tmp_path / "wrong.whl", change), source)


@pytest.mark.parametrize(
    "address", ["http://a.org", "https://example.org/x", "https://localhost/", "a.org", "https://a"]
)
def test_addresses_are_public_and_in_the_metadata(address: str) -> None:
    release.check_addresses({"Source": "https://a.org/b"}, ["Source, https://a.org/b"])
    with pytest.raises(ReleaseError, match=r"Project-URL: Source, https://a\.org/b is missing"):
        release.check_addresses({"Source": "https://a.org/b"}, [])
    with pytest.raises(ReleaseError, match=re.escape(f"must be a public https address, got {address}")):
        release.check_addresses({"Source": address}, [f"Source, {address}"])


def test_modules_that_need_no_extra_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is not there may only be one of an extra's."""
    (tmp_path / "shaderlm").mkdir()
    for name, text in {
        "__init__": "__version__ = '1'",
        "errors": "class ShaderlmError(Exception): ...",
        "server": "import not_there_at_all.part",
        "hint": "from .errors import ShaderlmError\nraise ShaderlmError(\"pip install 'shaderlm[serve]'\")",
    }.items():
        (tmp_path / "shaderlm" / f"{name}.py").write_text(text)
    monkeypatch.setattr(release, "clean", lambda folder: {**os.environ, "PYTHONPATH": str(tmp_path)})
    python = Path(sys.executable)
    release.import_all(python, {"serve": ["not-there-at-all>=1", "shaderlm[x]"]}, tmp_path)
    with pytest.raises(ReleaseError, match=r"shaderlm\.server: No module named 'not_there_at_all'"):
        release.import_all(python, {"serve": ["other"]}, tmp_path)
    (tmp_path / "shaderlm" / "broken.py").write_text("from . import nothing\n")
    with pytest.raises(ReleaseError, match=r"shaderlm\.broken: cannot import name 'nothing'"):
        release.import_all(python, {"serve": ["not_there_at_all", "shaderlm[x]"]}, tmp_path)


def test_a_clean_environment_has_no_options_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_GENERATE_DEVICE", "0")
    monkeypatch.setenv("SHADERLM_CACHE", "models")
    monkeypatch.setenv("PYTHONPATH", "src")
    variables = release.clean(tmp_path)
    assert not {"SHADERLM_GENERATE_DEVICE", "PYTHONPATH"} & variables.keys()
    assert (variables["SHADERLM_CACHE"], variables["SHADERLM_CONFIG"]) == ("models", os.devnull)


def test_a_command_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "LIMIT", 0.2)
    with pytest.raises(ReleaseError, match=r"did not end within 0\.2 s"):
        release.run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)


@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
@pytest.mark.full
def test_npm_installs_the_package(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"load is undefined in Node, expected a function"):
        release.check_npm(release.npm_package(source, tmp_path, 0))
    (source / release.ASSETS / "shaderlm.js").write_text("export function load() {}\n")
    assert release.check_npm(release.npm_package(source, tmp_path, 0)) == []


def test_an_sdist_has_what_the_commit_has(source: Path, tmp_path: Path) -> None:
    """Also what begins with a point, which tests read."""
    (source / ".github").mkdir()
    (source / ".github/form.yml").touch()
    folder = f"shaderlm-{release.version_of(source)}"

    def sdist(*left_out: str, more: str = "PKG-INFO") -> Path:
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
            for name in sorted(release.files_below(source) - {*left_out}):
                archive.add(source / name, f"{folder}/{name}")
            for name in {"PKG-INFO", more}:
                archive.addfile(tarfile.TarInfo(f"{folder}/{name}"))
        return tmp_path / "a.tar.gz"

    release.check_sdist(sdist(), source)
    with pytest.raises(ReleaseError, match=r"\.github/form\.yml is missing"):
        release.check_sdist(sdist(".github/form.yml"), source)
    with pytest.raises(ReleaseError, match=r"notes\.txt does not belong there"):
        release.check_sdist(sdist(more="notes.txt"), source)


def test_the_npm_package_is_the_same_twice_and_complete(source: Path, tmp_path: Path) -> None:
    packages = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        packages.append(release.npm_package(source, tmp_path / name, 1_700_000_000))
    release.check_equal([packages[0]], [packages[1]])
    with tarfile.open(packages[0]) as files:
        read = files.extractfile("package/package.json")
        assert read is not None
        manifest = json.load(read)
        assert {entry.mtime for entry in files.getmembers()} == {1_700_000_000}
    assert (manifest["name"], manifest["version"]) == ("shaderlm", release.version_of(source))
    assert manifest["files"] == ["shaderlm.d.ts", "shaderlm.js", "text.js"]


def test_a_script_of_the_npm_package_that_is_missing(source: Path, tmp_path: Path) -> None:
    (source / release.ASSETS / "text.js").unlink()
    package = release.npm_package(source, tmp_path, 0)
    with pytest.raises(ReleaseError, match=r"shaderlm.js imports text.js, which is not there"):
        release.check_npm(package)


def test_builds_that_differ_are_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.whl").write_text(name)
    with pytest.raises(ReleaseError, match=r"built twice, these differ: a\.whl"):
        release.check_equal([tmp_path / "one" / "a.whl"], [tmp_path / "two" / "a.whl"])


def test_a_version_that_is_none_to_publish(source: Path) -> None:
    release.check_version(source)
    version = source / "src/shaderlm/version.py"
    version.write_text('__version__ = "0.1.0.dev0"\n')
    with pytest.raises(ReleaseError, match=r"0\.1\.0\.dev0 is none to publish"):
        release.check_version(source)
    version.write_text('__version__ = "7.0.0"\n')
    with pytest.raises(ReleaseError, match=r"CHANGELOG\.md has no section \[7\.0\.0\]"):
        release.check_version(source)


def test_the_changelog_and_the_citation_have_the_version_and_one_date(source: Path) -> None:
    release.check_version(ROOT)
    changes = source / "CHANGELOG.md"
    text = changes.read_text(encoding="utf-8")
    changes.write_text(re.sub(r"\d{4}-\d\d-\d\d", "2025-01-31", text), encoding="utf-8")
    with pytest.raises(ReleaseError, match=r"CITATION\.cff does not say date-released: 2025-01-31"):
        release.check_version(source)
    changes.write_text(text.partition(" - ")[0] + "\n", encoding="utf-8")
    with pytest.raises(ReleaseError, match="with a date"):
        release.check_version(source)


def test_the_bill_of_materials_names_versions_and_licences(tmp_path: Path) -> None:
    file = tmp_path / "a.whl"
    file.write_bytes(b"wheel")

    def package(name: str, licence: str = "MIT") -> dict[str, object]:
        return {"name": name, "version": "1.0", "license": licence, "spdx": True}

    needed = {"shaderlm": package("shaderlm"), "cffi": package("cffi")}
    optional = {**needed, "Some_Thing": package("Some_Thing", "BSD-3-Clause")}
    bill = release.bill_of_materials("1.0", file, needed, optional, 0, "1.30")
    listed = [(each["purl"], each["scope"]) for each in bill["components"]]
    assert listed == [("pkg:pypi/cffi@1.0", "required"), ("pkg:pypi/some-thing@1.0", "optional")]
    assert bill["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00"
    assert bill["metadata"]["tools"]["components"][0]["version"] == "1.30"
    assert bill["serialNumber"] == release.bill_of_materials("1.0", file, needed, optional, 0, "1.30")["serialNumber"]
    with pytest.raises(ReleaseError, match=r"do not say their licence: cffi"):
        release.bill_of_materials("1.0", file, {**needed, "cffi": package("cffi", "")}, optional, 0, "1.30")


def test_the_commands_of_the_readme_are_found() -> None:
    text = "```bash\n./dev demo\nshaderlm info  # a model\n```\n\n```console\n$ shaderlm info\nsmollm2\n```\n"
    assert release.readme_commands(text) == [["shaderlm", "info"]]
    assert len(release.readme_commands((ROOT / "README.md").read_text(encoding="utf-8"))) > 5


def test_archives_are_unpacked_by_a_python_without_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = tarfile.TarFile.extractall
    monkeypatch.setattr(tarfile.TarFile, "extractall", lambda self, path: unpack(self, path))
    monkeypatch.delattr(tarfile, "data_filter")
    (tmp_path / "a").write_text("text")
    with tarfile.open(tmp_path / "archive.tar", "w") as files:
        files.add(tmp_path / "a", "a")
    with tarfile.open(tmp_path / "archive.tar") as files:
        release.unpack(files, tmp_path / "unpacked")
    assert (tmp_path / "unpacked" / "a").read_text() == "text"


def test_a_command_that_fails_is_shown_with_its_end(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"ends with 3:\nthe reason"):
        release.run([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"], tmp_path)


def test_forms_and_citation_are_valid() -> None:
    forms = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
    assert {path.stem for path in forms} == {"bug", "config", "feature", "gpu"}
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.stem == "config":
            continue
        assert {"name", "description", "body"} <= set(form)
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids))
        assert all(part["attributes"].get("label") or part["attributes"].get("value") for part in form["body"])
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["cff-version"], str(citation["version"])) == ("1.2.0", release.version_of(ROOT))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(citation["date-released"]))
