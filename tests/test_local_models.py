"""Models that are kept in the hub's cache: repositories that are damaged, and files that are not of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from shaderlm.cli import app
from shaderlm.errors import ModelError
from shaderlm.formats import local_models
from shaderlm.formats.find import find

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "hub"
    for name in ("huggingface_hub.constants.HF_HUB_CACHE", "huggingface_hub.constants.HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(name, str(found))
    monkeypatch.setenv("SHADERLM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return found


def _repository(cache: Path, repo: str, *names: str) -> Path:
    """A repository with files of six bytes, as the package keeps it."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    for i, name in enumerate(names):
        blob, link = folder / "blobs" / str(i), folder / "snapshots" / _COMMIT / name
        for path in (blob, link, folder / "refs" / "main"):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(b"weight")
        link.symlink_to(blob)
        (folder / "refs" / "main").write_text(_COMMIT)
    return folder


def _kept() -> list[str]:
    return [each.name for each in local_models.complete()]


def _interrupted() -> dict[str, int]:
    return {each.name: each.nbytes for each in local_models.interrupted()}


def test_rests_beside_a_model_do_not_endanger_it(cache: Path) -> None:
    """What is listed as interrupted can be removed by that name, and nothing else goes with it."""
    blobs = _repository(cache, "org/repo", "a.gguf") / "blobs"
    (blobs / "x.incomplete").write_bytes(b"of the package")
    (blobs / "y.sub%2Fb.gguf.shaderlm.incomplete").write_bytes(b"half")
    assert (_kept(), _interrupted()) == (["hf:org/repo/a.gguf"], {"hf:org/repo/sub/b.gguf": 4})
    for name in ("gguf", "b.gguf", "sub/a.gguf"):
        with pytest.raises(ModelError, match="there is no model"):
            local_models.remove(f"hf:org/repo/{name}")
    assert local_models.remove("hf:org/repo/sub/b.gguf") == 4
    assert (_kept(), _interrupted()) == (["hf:org/repo/a.gguf"], {})


def test_files_of_other_programs_stay(cache: Path) -> None:
    folder = _repository(cache, "org/other", "pytorch_model.bin", "a.gguf")
    assert local_models.remove("hf:org/other/a.gguf") == 6
    (folder / "blobs" / "x.incomplete").write_bytes(b"half")
    assert (_kept(), _interrupted()) == ([], {"hf:org/other": 4})
    assert local_models.remove("hf:org/other") == 4
    assert (folder / "snapshots" / _COMMIT / "pytorch_model.bin").read_bytes() == b"weight"
    with pytest.raises(ModelError, match="there is no model"):
        local_models.remove("hf:org/other")


def test_what_is_not_of_the_cache_stays(cache: Path, tmp_path: Path) -> None:
    """Links to files elsewhere, and a repository that is a link itself."""
    folder, mine = _repository(cache, "org/repo", "a.gguf"), tmp_path / "mine"
    mine.mkdir()
    (mine / "own.gguf").write_bytes(b"mine")
    (folder / "snapshots" / _COMMIT / "b.gguf").symlink_to(mine / "own.gguf")
    assert local_models.remove("hf:org/repo/b.gguf") == 0
    assert _kept() == ["hf:org/repo/a.gguf"]
    folder.rename(mine / "moved")
    folder.symlink_to(mine / "moved")
    (mine / "moved" / "thesis").write_text("long")
    assert local_models.remove("hf:org/repo") > 0
    assert sorted(path.name for path in mine.rglob("*")) == ["moved", "own.gguf", "thesis"]
    assert _kept() == []


def test_damaged_repositories_hide_no_other_and_can_be_removed(cache: Path) -> None:
    two = ("a.gguf", "b.gguf")
    given = {"link": two, "ref": two, "commit": two, "part": ("a-00002-of-00002.gguf",), "config": ("config.json",)}
    folders = {name: _repository(cache, f"org/{name}", *files) for name, files in given.items()}
    (folders["link"] / "blobs" / "1").unlink()
    (folders["ref"] / "refs" / "main").write_bytes(b"\xff")
    (folders["commit"] / "refs" / "main").write_text("../../../..")
    (cache / "models--org--file").write_text("a file")
    there = [("commit", "a"), ("commit", "b"), ("link", "a"), ("ref", "a"), ("ref", "b")]
    assert _kept() == [f"hf:org/{repo}/{file}.gguf" for repo, file in there]
    with pytest.raises(ModelError, match="damaged in the hub's cache: refs/main names no commit"):
        find("hf:org/commit")
    for name, folder in folders.items():
        assert local_models.remove(f"hf:org/{name}") > 0
        assert not folder.exists()
    with pytest.raises(ModelError, match="there is no model"):
        local_models.remove("hf:org/file")


def test_a_name_that_the_package_refuses(cache: Path) -> None:
    (cache / "models--org--a--b" / "blobs").mkdir(parents=True)
    (cache / "models--org--a--b" / "blobs" / "x.incomplete").write_bytes(b"half")
    assert _interrupted() == {"hf:org/a--b": 4}
    assert local_models.remove("hf:org/a--b") == 4


def test_copies_that_are_no_files(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own" / "quantized"
    (folder / "folder.gguf").mkdir(parents=True)
    (folder / "gone.gguf").symlink_to(tmp_path / "nowhere")
    assert _kept() == []


def test_names_are_printed_without_control_characters(cache: Path) -> None:
    _repository(cache, "org/repo", "a\x1b[31m\nb.gguf")
    said = CliRunner().invoke(app, ["models"]).output
    assert said.startswith("hf:org/repo/a�[31m�b.gguf ")
    assert "\x1b" not in said
