"""Which messages of a conversation the model sees, by the page's rule, where its context is full."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shaderlm import page

from . import node
from .javascript import run_in_chromium

ASSETS = Path(page.__file__).parent / "assets"
# A token is a character here: 300 + 300 + 100 + 100 + 100 of them.
MESSAGES = [
    {"role": "user" if i % 2 == 0 else "assistant", "content": "x" * length}
    for i, length in enumerate((300, 300, 100, 100, 100))
]
# Context, tokens of an answer → the first message. At most a quarter of the context is kept free for an answer.
CASES = [
    ((1000, 100), 0),  # it just fits
    ((999, 100), 2),  # one too many: then there is room for two answers
    ((500, 25), 2),
    ((500, 200), 4),
    ((100, 100), 4),  # the last message stays, though no answer fits
    ((99, 100), "context"),
]
SCRIPT = """
import {{ firstThatFits }} from "./context.js";
const messages = {messages};
const count = async (sent) => sent.reduce((sum, {{ content }}) => sum + content.length, 0);
export const found = [];
for (const [context, answer] of {cases}) {{
  const how = {{ system: "", answer, context, count }};
  found.push(await firstThatFits(messages, 0, how).catch((problem) => problem.kind));
}}
"""


@pytest.mark.parametrize("where", ["node", pytest.param("chromium", marks=pytest.mark.browser)])
def test_the_oldest_turns_are_left_out(where: str, tmp_path: Path) -> None:
    script = SCRIPT.format(messages=json.dumps(MESSAGES), cases=json.dumps([case for case, _ in CASES]))
    files = ("context.js", "problems.js")
    found: Any
    if where == "chromium":
        found = run_in_chromium(tmp_path, {name: (ASSETS / name).read_text(encoding="utf-8") for name in files}, script)
    else:
        for name in files:
            shutil.copy(ASSETS / name, tmp_path)
        (tmp_path / "package.json").write_text('{"type": "module"}')
        (tmp_path / "main.js").write_text(f"{script}console.log(JSON.stringify(found));\n")
        ended = node.run(tmp_path, "main.js", gpu=False)
        assert ended.status == 0, ended.err
        found = json.loads(ended.out)
    assert found == [first for _, first in CASES]
