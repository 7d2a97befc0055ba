"""The documents are true: their code runs, their commands exist, their tables are complete, their words are plain."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from shaderlm.cli import app
from shaderlm.compile.execute import op_plan
from shaderlm.compile.lowering import Lowering
from shaderlm.compile.plan import Role
from shaderlm.compile.plan_json import to_json
from shaderlm.engine import LanguageModel, load
from shaderlm.engine.options import CHAT_OPTION_NAMES, OPTION_NAMES
from shaderlm.formats.hf.models import MODEL_TYPES
from shaderlm.formats.hf.tower_families import FAMILIES as TOWERS
from shaderlm.formats.short_names import SHORT_NAMES
from shaderlm.formats.weight_formats import WEIGHT_FORMATS
from shaderlm.gpu import WEBGPU_DEFAULT, DevicePolicy
from shaderlm.graph import resolve
from shaderlm.graph.batch import CONTEXTS
from shaderlm.graph.fuse import FUSIONS, fuse
from shaderlm.graph.ops import EPILOGUES, PROLOGUES
from shaderlm.kernels import all_routes, choose
from shaderlm.kernels.linear.formats import FORMATS
from shaderlm.models.config import StepSpec
from shaderlm.models.supported import ARCHITECTURES
from shaderlm.runtime.runner import MAX_OUTPUTS
from shaderlm.runtime.sizes import cache_format
from shaderlm.server.limits import Limits

from .architectures import model
from .checkpoints import names as checkpoint_names
from .checkpoints import recorded
from .oracles import ARCHITECTURES as ORACLES
from .test_plan import CASES, SOFTWARE, plan_of
from .test_structure import LAYERS
from .tiers import runs_all

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
# Records of what was done: numbers and long sentences of their day stay as they are.
RECORDS = ("CHANGELOG.md", "log.md")
CURRENT = [document for document in DOCUMENTS if document.name not in RECORDS]
MAX_WORDS = 25  # of a sentence
# Terms that only people of this project would understand, and the usual ones.
PRIVATE_TERMS = {
    "stock": "command-buffer pool",
    "mailbox": "read-back ring",
    "letters?": "pending read-back",
    "cuts?|uncut": "tile, launch configuration or tuning candidate",
    "recipes?": "launch list",
    "facts": "device capabilities",
    "why_not": "unsupported_reason",
    "refusals?": "unsupported reason, rejected fusion",
    "stamps?": "timestamp",
    "heats?|heating": "warm-up",
    "chooser": "sampler",
    "next_position": "advance_position",
    "pieces?": "delta, part",
    "houses?": "project",
    "rooms?": "package, capacity",
    "floors?": "layer",
    "doors?": "entry point",
    "arena": "scratch",
}


def _blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.M | re.S)


def _prose(document: Path) -> str:
    """The text without code, comments, tables and titles."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "\n", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^(\||#|\s*$).*$", "", text, flags=re.M)


# Code and commands ---------------------------------------------------------------------------------------


NOT_RUN = ("CONTRIBUTING.md", "scaling.md", "vision.md")


@pytest.mark.full
@pytest.mark.parametrize(
    "document",
    # The example of scaling.md needs Ray: its call is that of test_ray_serve. That of vision.md needs a model that
    # sees: its call is that of test_vision.
    [each for each in CURRENT if each.name not in NOT_RUN and _blocks(each, "python")],
    ids=lambda path: path.name,
)
def test_python_examples_run(
    document: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in _blocks(document, "python"):
        exec(compile(block, document.name, "exec"), {})
    if document.name == "README.md":
        out = capsys.readouterr().out
        assert "taken by default" in out
        assert re.search(r"^(stop|length) \[", out, re.M), "a streamed text ends with a newline"


@pytest.mark.parametrize("document", [each for each in CURRENT if _blocks(each, "console")], ids=lambda path: path.name)
def test_transcripts_are_real(document: Path) -> None:
    """What a document shows after `$ shaderlm …` is what the command prints."""
    for command, _, expected in (block.partition("\n") for block in _blocks(document, "console")):
        words = shlex.split(command)
        assert words[:2] == ["$", "shaderlm"], command
        done = CliRunner().invoke(app, words[2:])
        assert done.exit_code == 0, f"{command}: {done.output}"
        assert done.stdout.rstrip() == expected.rstrip(), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_links_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for line in (line for block in _blocks(document, "bash") for line in block.splitlines()):
        words = shlex.split(line, comments=True)
        if words[:1] == ["shaderlm"]:
            done = CliRunner().invoke(app, [*words[1:], "--help"])
            assert done.exit_code == 0, f"{line}: {done.output}"
        elif words:
            assert words[0] == "./dev", line
            assert re.search(rf"^  {words[1]}\)", (ROOT / "dev").read_text(encoding="utf-8"), re.M), line
    for target, part in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        linked = document.parent / target if target else document
        assert linked.exists(), f"{document.name} links to {target}"
        if part:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert part in anchors, f"{document.name} links to {target}#{part}; there are {anchors}"


@pytest.mark.parametrize("document", CURRENT, ids=lambda path: path.name)
def test_options_in_the_text_exist(document: Path) -> None:
    """`shaderlm COMMAND --option`, inside a sentence or a table."""
    text = document.read_text(encoding="utf-8")
    for shown in re.findall(r"`shaderlm ([a-z]+(?: kernels)?[^`\n]*)`", text):
        words = shlex.split(shown.replace("…", ""))
        command: Any = app
        while words and not words[0].startswith("-") and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        assert command is not app, f"{document.name}: there is no command `shaderlm {shown}`"
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = [word for word in words if re.match(r"--?[a-z]", word) and word not in known]
        assert not unknown, f"{document.name}: `shaderlm {shown}` has no {unknown}"


def test_paths_exist() -> None:
    """Files that a document names in backticks, below the root, the package or the kernels."""
    places = [ROOT, ROOT / "src" / "shaderlm", ROOT / "src" / "shaderlm" / "kernels"]
    new = set(dict(_examples()))
    for document in CURRENT:
        for named in re.findall(r"`([\w/]+/[\w/.-]*\.(?:py|wgsl|md|json|txt))`", document.read_text(encoding="utf-8")):
            generic = re.search(r"NAME|DEVICE", named)
            assert generic or named in new or any((place / named).exists() for place in places), (
                f"{document.name} names {named}, which does not exist"
            )


# Words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_nothing_was_left_to_be_filled_in(document: Path) -> None:
    assert not re.findall(r"@@\w*|TODO|FIXME|XXX", document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_private_terms(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    for term, usual in PRIVATE_TERMS.items():
        found = re.search(rf"(?<![\w-])({term})(?![\w-])", text, re.I)
        beside = text[max(0, found.start() - 40) : found.end() + 40] if found else ""
        assert found is None, f"{document.name}: {beside!r}; write {usual}"


@pytest.mark.parametrize("document", CURRENT, ids=lambda path: path.name)
def test_sentences_are_short(document: Path) -> None:
    text = re.sub(r"`[^`]*`", "code", re.sub(r"\]\([^)]*\)", "]", _prose(document)))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    sentences = [each for paragraph in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", paragraph)]
    counted = [[word for word in sentence.split() if re.search(r"\w", word)] for sentence in sentences]
    long = [" ".join(words) for words in counted if len(words) > MAX_WORDS]
    assert not long, f"{document.name}: more than {MAX_WORDS} words in: " + "\n".join(long)


def test_the_glossary_is_short() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text.partition("## Glossary")[2].partition("\n## ")[0], re.M)
    assert 10 <= len(rows[1:]) <= 20, rows


# Completeness --------------------------------------------------------------------------------------------


def test_every_op_is_documented_and_every_route_named_exists() -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert not [op for op in all_routes() if f"`{op}`" not in text]
    routes = {route.name for routes in all_routes().values() for route in routes}
    assert not [name for name in routes if f"`{name}`" not in text]
    fusions = {fusion.name for fusion in FUSIONS}
    assert not [name for name in fusions if f"`{name}`" not in text]
    kernels = {path.stem for path in (ROOT / "src" / "shaderlm" / "kernels").rglob("*.wgsl")}
    policies = {each.name for each in fields(DevicePolicy)}
    known = {*routes, *all_routes(), *fusions, *kernels, *PROLOGUES, *EPILOGUES, *policies}
    assert not [name for name in re.findall(r"^\| `(\w+)`", text, re.M) if name not in known]


@pytest.mark.parametrize(
    ("name", "script"),
    [
        ("speed", "engine_speed"),
        ("architecture", "architecture"),
        ("row-times", "row_times"),
        ("sequences", "sequences"),
    ],
)
def test_a_chart_shows_its_data(name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture is what its data draws."""
    folder = ROOT / "docs"
    monkeypatch.syspath_prepend(folder)
    module = importlib.import_module(script)
    file = folder / name
    data = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
    drawn = file.with_suffix(".svg").read_text(encoding="utf-8")
    assert drawn == module.draw(data), f"run `python docs/{script}.py`"
    ElementTree.fromstring(drawn)


def test_the_picture_of_the_packages_has_them_in_order() -> None:
    rows = json.loads((ROOT / "docs" / "architecture.json").read_text(encoding="utf-8"))["rows"]
    names = [[name for box, _ in row for name in box.split(", ")] for row in rows]
    packages = {path.parent.name for path in (ROOT / "src" / "shaderlm").glob("*/__init__.py")}
    assert sorted(itertools.chain(*names)) == sorted(packages - {"limited"})
    heights = [[LAYERS.index(name) for name in row] for row in names]
    assert all(min(above) > max(below) for above, below in itertools.pairwise(heights))


def test_the_readme_has_the_numbers_of_its_chart() -> None:
    data = json.loads((ROOT / "docs" / "speed.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for test, values in data["tests"]:
        assert f"| {test} | " + " | ".join(f"{value:,}" for value in values) + " |" in readme
    rows = re.findall(r"^\| Llama-3\.[^|]+ \| ([\d,]+) \| ([\d,]+) \|$", readme, re.M)
    assert len(rows) >= len(data["tests"])
    all_numbers = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for ours, theirs in rows:
        assert re.search(rf"^\| [^|]+ \| {ours} \| [\d,]+ \| {theirs} \|$", all_numbers, re.M), (ours, theirs)


def test_the_life_of_a_token_has_the_numbers_of_its_plans() -> None:
    shape, options, large = CASES["smollm2-135m on a large GPU"]
    made, config = model(shape, **options)
    text = (ROOT / "docs" / "life-of-a-token.md").read_text(encoding="utf-8")
    cases = (("large GPU", large, "fast"), ('large GPU, `precision="exact"`', large, "exact"))
    for name, caps, precision in (*cases, ("software adapter", SOFTWARE, "fast")):
        lowering = Lowering(caps, precision, None)
        graphs = (
            made.build(config, StepSpec(1, CONTEXTS[0], cache_format(caps), paged=False)),
            made.head(config, 1, 1),
        )
        fused = [fuse(graph, None, lowering.unsupported_reason)[0] for graph in graphs]
        dispatches = len(plan_of(made, config, caps, 1, precision=precision).program.steps)
        nodes, fewer = (sum(len(graph.nodes) for graph in each) for each in (graphs, fused))
        assert f"| {name} | {nodes} | {fewer} | {dispatches} |" in text


def test_the_size_of_the_model_is_the_same_everywhere() -> None:
    from shaderlm.formats.default_model import SIZE

    size = f"{SIZE / 1e6:.0f} MB"
    assert f"({size})" in (ROOT / "README.md").read_text(encoding="utf-8")
    others = re.findall(r"\d+ MB, fetched once", (ROOT / "dev").read_text(encoding="utf-8"))
    assert others == [f"{size}, fetched once"]


def test_the_short_names_are_documented() -> None:
    rows = [f"| `{name}` | {row.repo} | `{row.file}` | {row.gigabytes:g} |\n" for name, row in SHORT_NAMES.items()]
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert f"| short name | repository | file | GB |\n|---|---|---|---|\n{''.join(rows)}" in text
    assert not [row.seen for row in SHORT_NAMES.values() if row.seen not in text]


def _first_cells(document: str, title: str) -> set[str]:
    """The names in backticks that begin the rows of tables below a title."""
    text = (ROOT / document).read_text(encoding="utf-8")
    part = re.split(r"^#+ ", text.partition(f"# {title}\n")[2], maxsplit=1, flags=re.M)[0]
    assert part, f"{document} has no part {title!r}"
    cells = re.findall(r"^\| ([^|]+) \|", part, re.M)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_counts_in_documents_are_those_of_the_code() -> None:
    counts = {
        "README.md": f"more than {(len(ARCHITECTURES) - 1) // 10 * 10} architectures",
        "docs/life-of-a-token.md": f"… {MAX_OUTPUTS} rows that give something",
        "docs/tuning.md": f"… {MAX_OUTPUTS}: as many as may give logits",
        "docs/evaluation.md": f"rows, {MAX_OUTPUTS} at most",
    }
    for document, words in counts.items():
        assert words in (ROOT / document).read_text(encoding="utf-8"), f"{document} does not say {words!r}"


def test_the_models_that_see_are_those_whose_folders_are_read() -> None:
    rows = (ROOT / "docs" / "vision.md").read_text(encoding="utf-8").partition("| family | folders")[2]
    cells = re.findall(r"^\| [^|]+ \| (`[^|]+) \|", rows.partition("\n\n")[0], re.M)
    shown = {name for cell in cells for name in re.findall(r"`(\w+)`", cell.split(" with ")[0])}
    assert shown == {each.split()[0] for each in TOWERS} <= set(MODEL_TYPES)


def test_the_signature_of_load_is_documented() -> None:
    parameters = list(inspect.signature(load).parameters.values())
    shown = ", ".join(f"{each.name}={each.default!r}" for each in parameters).replace("'", '"')
    signature = f"`shaderlm.load({shown.replace('model=None', 'model=None, *', 1)})`"
    assert signature in (ROOT / "docs" / "models.md").read_text(encoding="utf-8"), signature


def test_the_keys_of_plans_are_documented() -> None:
    dims = resolve("silu_mul", {"count": 64})
    plan = json.loads(to_json(op_plan(choose("silu_mul", dims, WEBGPU_DEFAULT, None), dims, WEBGPU_DEFAULT)))
    assert _first_cells("docs/plans.md", "Top level") == set(plan)
    assert _first_cells("docs/plans.md", "Buffers") == set(get_args(Role))
    assert _first_cells("docs/plans.md", "Steps and shaders") == {*plan["steps"][0], *plan["shaders"][0]}
    kinds = {form.layout["kind"] for form in FORMATS.values()}
    assert kinds <= _first_cells("docs/plans.md", "Weights")


def test_every_option_is_documented_with_its_default() -> None:
    title = "Options of `generate`, `stream`, `chat` and `stream_chat`"
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition(title)[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.partition("\n#")[0], re.M))
    assert set(rows) == set(OPTION_NAMES)
    words: dict[str, tuple[Any, ...]] = {"none": ((), {}), "random": (None,)}
    for name, parameter in inspect.signature(LanguageModel.generate).parameters.items():
        if name in rows:
            said = rows[name].split(" (")[0]
            assert parameter.default in words.get(said, ()) or str(parameter.default).removesuffix(".0") == said, name


def test_every_option_of_a_chat_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "structured.md").read_text(encoding="utf-8").partition("| option of `chat`")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text.partition("\n\n")[0], re.M))
    parameters = inspect.signature(LanguageModel.chat).parameters
    assert rows == {name: str(parameters[name].default) for name in CHAT_OPTION_NAMES}


def test_the_readme_lists_formats() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in WEIGHT_FORMATS if not re.search(rf"\b{name}\b", readme, re.I)]


def test_every_architecture_has_a_row_with_its_folders_and_its_checkpoints() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("| architecture | models |")[2]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text.partition("\n\n")[0], re.M)
    names = [name for name, *_ in rows]
    assert names == sorted(ARCHITECTURES), "one row for each architecture, in the order of the alphabet"
    bold = dict(ORACLES)
    plain = {name: recorded(name)["architecture"] for name in checkpoint_names()}
    for name, models, types, checked in rows:
        assert models.strip()
        folders = {kind for kind, row in MODEL_TYPES.items() if row.architecture == name}
        assert set(re.findall(r"`([^`]+)`", types)) == folders, f"model_type of {name}"
        shown = checked.split(", ")
        assert {each.strip("*") for each in shown if "**" in each} == {each for each in bold if bold[each] == name}
        assert {each.strip("*") for each in shown} == {each for each, own in (plain | bold).items() if own == name}
        assert checked.strip(" –"), f"{name} has no checkpoint"


# The examples of CONTRIBUTING ----------------------------------------------------------------------------


def _examples(there: bool = False) -> list[tuple[str, str]]:
    """(path, text) of every example that begins with the name of its file, and is to be added or is `there`."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.findall(r"^`((?:src|tests|docs)/[\w/.]+)`([^\n]*):\n\n```\w+\n(.*?)^```", text, re.M | re.S)
    return [(path, example) for path, words, example in found if ("as it is" in words) == there]


def test_the_tests_that_security_names_exist() -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {test}"


def test_every_limit_of_the_server_is_documented_with_its_default() -> None:
    text = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d,]+)", text.partition("### Limits")[2].partition("\n### ")[0], re.M))
    assert {name: float(value.replace(",", "")) for name, value in rows.items()} == asdict(Limits())


def test_examples_that_are_there_are_as_they_are_shown() -> None:
    shown = _examples(there=True)
    assert len(shown) == 5
    for path, example in shown:
        assert example in (ROOT / path).read_text(encoding="utf-8"), path


@pytest.mark.full
def test_the_examples_of_contributing_add_a_route_and_an_op(tmp_path: Path) -> None:
    """As the document says: both are found, and format, lint, types and the tests that concern them pass."""
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    examples = _examples()
    assert len(examples) == 9
    for path, example in examples:
        file = tmp_path / path
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        table = text.partition("\n)\nPRIMITIVES: ")
        if table[1]:
            file.write_text(f"{table[0]}\n{example.rstrip()}{table[1]}{table[2]}", encoding="utf-8")
        else:
            file.write_text(f"{text}\n\n{example}" if text else example, encoding="utf-8")
    with (tmp_path / "docs" / "kernels.md").open("a", encoding="utf-8") as kernels:
        kernels.write("\n| op | route | how |\n|---|---|---|\n| `relu` | `scalar` | one thread per value |\n")
    script = """
import numpy as np
from shaderlm import ops
from shaderlm.gpu import open_device
from shaderlm.graph import resolve
from shaderlm.compile import run_op
x = np.arange(1023, dtype=np.float32) - 500
assert ops.routes("copy") == ["vec4", "scalar"]
raw = run_op(open_device(), "copy", resolve("copy", {"count": 1023}), {"x": x}, None)
assert (raw["out"].view(np.float32) == x).all()
"""
    search = os.pathsep.join([str(tmp_path / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search}
    changed = sorted({path for path, _ in examples if path.endswith(".py")})
    tests = [f"tests/test_{name}.py" for name in ("kernels", "structure", "cost", "docs")]
    picked = "(relu and not relu_squared) or (copy and (7 or scalar or layout or cost)) or dead"
    picked += " or every_op_with_kernels or every_op_is_documented"
    commands = (
        ["-m", "ruff", "check", "."],
        ["-m", "ruff", "format", "--check", "."],
        *([["-m", "mypy", *changed]] if runs_all() else []),  # a minute, without its cache
        ["-c", script],
        ["-m", "pytest", "--full", "-q", "-p", "no:cacheprovider", *tests, "-k", picked, "-rA"],
    )
    for command in commands:
        done = subprocess.run([sys.executable, *command], env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    for passed in ("test_kernels.py::", "test_route[copy/scalar]", "test_route[relu/scalar]", "test_no_kernel_is_dead"):
        assert re.search(rf"^PASSED .*{re.escape(passed)}", done.stdout, re.M), done.stdout
