"""Every architecture through `generate`, `chat` and `plan`, in Python and on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import shaderlm
from shaderlm.compile.plan_json import from_json
from shaderlm.errors import ModelError
from shaderlm.models.supported import architecture

from . import checkpoints
from .command_line import Done
from .command_line import shaderlm as command
from .gguf_files import add_text
from .oracles import ARCHITECTURES, SOURCES, Oracle
from .sweeps import every_third_by_default

TEMPLATE = "{% for each in messages %}{{ each['role'] + ': ' + each['content'] + '\n' }}{% endfor %}"
# Of the architectures that have no oracle, the first checkpoint of each.
OTHERS = {
    entry["architecture"]: (name, entry)
    for name, entry in reversed([(name, checkpoints.recorded(name)) for name in checkpoints.names()])
    if entry["architecture"] not in ARCHITECTURES.values()
}


class Checkpoint(NamedTuple):
    """A file or a folder with a chat template; prompts with the ids that follow, if its context is this (None: all)."""

    path: Path
    context: int | None
    cases: list[tuple[list[int], list[int]]]


_MODELS = [*SOURCES, *OTHERS]


@pytest.fixture(
    scope="module",
    params=every_third_by_default(_MODELS),
    ids=[each if isinstance(each, str) else " ".join(each) for each in _MODELS],
)
def checkpoint(
    request: pytest.FixtureRequest, oracles: dict[str, Oracle], tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    folder = tmp_path_factory.mktemp("chat")
    if request.param in OTHERS:
        _, entry = OTHERS[request.param]
        cases = list(zip(checkpoints.PROMPTS, entry["greedy"], strict=True))
        return Checkpoint(checkpoints.write_gguf(folder / "model.gguf", entry), None, cases)
    name, source = request.param
    found, made = oracles[name].folder / source, folder / source
    if found.is_file():
        add_text(found, made, "tokenizer.chat_template", TEMPLATE)
    else:
        shutil.copytree(found, made)
        (made / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return Checkpoint(made, 512, [(case.prompt, case.greedy) for case in oracles[name].cases(source)[512]])


def test_all_are_here() -> None:
    with pytest.raises(ModelError) as caught:
        architecture({})
    known = str(caught.value).split("supported: ")[1].split(", ")
    assert set(known) == {*ARCHITECTURES.values(), *OTHERS}


def run(name: str, model: Checkpoint, *arguments: object, given: str = "") -> Done:
    context = () if model.context is None else ("--context", model.context)
    done = command(name, "-m", model.path, "--device", "cpu", "-t", 0, *context, *arguments, given=given)
    assert done.code == 0, done.err
    return done


def test_generate(checkpoint: Checkpoint) -> None:
    """All prompts at once; again, by what the prefix cache has of them; and a text, by both."""
    with shaderlm.load(checkpoint.path, device="cpu", context=checkpoint.context) as model:
        for _ in range(2):
            handles = [
                model.engine.submit(model.request(prompt, max_tokens=len(greedy), ignore_eos=True))
                for prompt, greedy in checkpoint.cases
            ]
            found = [handle.result() for handle in handles]
            assert [each and each.ids for each in found] == [greedy for _, greedy in checkpoint.cases]
        # Prompts that are shorter than a page leave no state that others could begin with.
        assert model.engine.stats().prefix_hits > 0 or model.config.recurrent
        expected = model.generate("Hello world", max_tokens=12, ignore_eos=True)
        assert len(expected.ids) == 12
    options = ("Hello world", "--raw", "-n", 12, "--ignore-eos")
    assert run("generate", checkpoint, *options).out == f"{expected}\n"


def test_chat(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADERLM_STATE", str(tmp_path))
    messages: list[dict[str, str]] = []
    with shaderlm.load(checkpoint.path, device="cpu", context=checkpoint.context) as model:
        for said in ("Hello", "And you?"):
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": str(model.chat(messages, max_tokens=6))})
    done = run("chat", checkpoint, "-n", 6, given="Hello\nAnd you?\n")
    assert done.out == f"{messages[1]['content']}\n{messages[3]['content']}\n"


@pytest.mark.parametrize("target", ["large-gpu", "webgpu-default"])
def test_plan(checkpoint: Checkpoint, target: str) -> None:
    done = command("plan", checkpoint.path, "--target", target, "--no-tune", "--json")
    assert (done.code, done.err) == (0, "")
    fused = [from_json(json.dumps(plan)) for plan in json.loads(done.out)]
    assert [plan.name for plan in fused] == ["prefill", "decode"]
    done = command("plan", checkpoint.path, "--target", target, "--no-tune", "--json", "--unfused")
    unfused = [from_json(json.dumps(plan)) for plan in json.loads(done.out)]
    for one, other in zip(fused, unfused, strict=True):
        assert len(one.launches) < len(other.launches)
