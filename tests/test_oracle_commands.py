"""Every architecture through `generate`, `chat` and `plan`, in Python and on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import shaderlm
from shaderlm.compile.plan_json import from_json

from .command_line import Done
from .command_line import shaderlm as command
from .gguf_files import add_text
from .oracles import SOURCES, Case, Oracle

TEMPLATE = "{% for each in messages %}{{ each['role'] + ': ' + each['content'] + '\n' }}{% endfor %}"


class Checkpoint(NamedTuple):
    path: Path
    cases: list[Case]


@pytest.fixture(scope="module", params=SOURCES, ids=" ".join)
def checkpoint(
    request: pytest.FixtureRequest, oracles: dict[str, Oracle], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    """With a chat template, which the recorded ones do not have."""
    name, source = request.param
    found, made = oracles[name].folder / source, tmp_path_factory.mktemp("chat") / source
    if found.is_file():
        add_text(found, made, "tokenizer.chat_template", TEMPLATE)
    else:
        shutil.copytree(found, made)
        (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return Checkpoint(made, oracles[name].cases(source)[512])


def run(name: str, path: Path, *arguments: object, given: str = "") -> Done:
    done = command(name, "-m", path, "--device", "cpu", "--context", 512, "-t", 0, *arguments, given=given)
    assert done.code == 0, done.err
    return done


def test_generate(checkpoint: Checkpoint) -> None:
    """All prompts at once, twice: the long one is found in the prefix cache then."""
    with shaderlm.load(checkpoint.path, device="cpu", context=512) as model:
        for _ in range(2):
            requests = [model.request(case.prompt, max_tokens=12, ignore_eos=True) for case in checkpoint.cases]
            handles = [model.engine.submit(each) for each in requests]
            for handle, case in zip(handles, checkpoint.cases, strict=True):
                found = handle.result()
                assert found is not None
                assert found.ids == case.greedy
        assert model.engine.stats().prefix_hits > 0
        expected = model.generate("Hello world", max_tokens=12, ignore_eos=True)
        assert len(expected.ids) == 12
    options = ("Hello world", "--raw", "-n", 12, "--ignore-eos")
    assert run("generate", checkpoint.path, *options).out == f"{expected}\n"


def test_chat(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_STATE", str(tmp_path))
    messages: list[dict[str, str]] = []
    with shaderlm.load(checkpoint.path, device="cpu", context=512) as model:
        for said in ("Hello", "And you?"):
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": str(model.chat(messages, max_tokens=6))})
    done = run("chat", checkpoint.path, "-n", 6, given="Hello\nAnd you?\n")
    assert done.out == f"{messages[1]['content']}\n{messages[3]['content']}\n"


@pytest.mark.parametrize("target", ["large-gpu", "webgpu-default"])
def test_plan(checkpoint: Checkpoint, target: str) -> None:
    done = command("plan", checkpoint.path, "--target", target, "--no-tune", "--json")
    assert (done.code, done.err) == (0, "")
    fused = [from_json(json.dumps(plan)) for plan in json.loads(done.out)]
    assert [(plan.name, plan.tokens) for plan in fused] == [("prefill", 128), ("decode", 1)]
    done = command("plan", checkpoint.path, "--target", target, "--no-tune", "--json", "--unfused")
    unfused = [from_json(json.dumps(plan)) for plan in json.loads(done.out)]
    for one, other in zip(fused, unfused, strict=True):
        assert len(one.launches) < len(other.launches)
