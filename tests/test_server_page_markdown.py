"""Markdown of the page at `/`, in a real Chromium (`--browser`): what it becomes, whatever a model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from .browser import Browser
from .serving import running
from .test_server_page import HOSTILE, READY, RICH, Speaker

pytestmark = pytest.mark.xdist_group("server page")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(Speaker().load) as server:
        browser = Browser(tmp_path_factory.mktemp("browser"))
        browser.open(server.url)
        browser.until(READY)
        yield browser
        browser.close()


# Elements and texts of what the renderer makes, as nested lists.
TREE = """(text => import("/assets/markdown.js").then(({showMarkdown}) => {
  const box = document.createElement("div");
  document.body.append(box);
  const start = performance.now();
  showMarkdown(box, text);
  const took = performance.now() - start;
  const tree = node => node.nodeType === 3 ? node.data
    : [node.localName + (node.href ? ` ${node.getAttribute("href")}` : ""), ...[...node.childNodes].map(tree)];
  const depth = node => 1 + [...node.children].reduce((most, child) => Math.max(most, depth(child)), 0);
  const nodes = [...box.querySelectorAll("*")];
  const made = {depth: depth(box), tree: tree(box).slice(1), took, tags: nodes.map(n => n.localName),
    attributes: nodes.flatMap(n => [...n.attributes].map(a => a.name))};
  box.remove();
  return made;
}))"""
TAGS = "p br em strong del code a h3 h4 h5 h6 hr blockquote ul ol li div span button pre table thead tbody tr th td"
ATTRIBUTES = "href target rel class tabindex role aria-label type start scope"


def rendered(browser: Browser, text: str) -> Any:
    return browser.run(f"{TREE}({json.dumps(text)})")


@pytest.mark.browser
def test_markdown(page: Browser) -> None:
    link = "https://a.example/x_(y)"
    for text, tree in {
        "a **b *c* d** e": [["p", "a ", ["strong", "b ", ["em", "c"], " d"], " e"]],
        "snake_case_name 2 * 3 * 4": [["p", "snake_case_name 2 * 3 * 4"]],
        "***x*** ~~y~~ **open": [["p", ["em", ["strong", "x"]], " ", ["del", "y"], " **open"]],
        "`a < *b*` and ``c ` d``": [["p", ["code", "a < *b*"], " and ", ["code", "c ` d"]]],
        "one\ntwo": [["p", "one", ["br"], "two"]],
        "## Head `x` ##": [["h4", "Head ", ["code", "x"]]],
        "- a\n- b\n  - c\n- d": [["ul", ["li", "a"], ["li", "b", ["ul", ["li", "c"]]], ["li", "d"]]],
        "3. a\n4. b": [["ol", ["li", "a"], ["li", "b"]]],
        "- a\n\n- b": [["ul", ["li", ["p", "a"]], ["li", ["p", "b"]]]],
        "> a\n> - b\n\nc": [["blockquote", ["p", "a"], ["ul", ["li", "b"]]], ["p", "c"]],
        "a\n\n---\n\nb": [["p", "a"], ["hr"], ["p", "b"]],
        f"see {link}.": [["p", "see ", [f"a {link}", link], "."]],
        f"[*b*]({link} 'title') <{link}>": [["p", [f"a {link}", ["em", "b"]], " ", [f"a {link}", link]]],
        f"![picture]({link})": [["p", [f"a {link}", "picture"]]],
        "\\*a\\* &lt;b&gt; a<br>b": [["p", "*a* <b> a", ["br"], "b"]],
        "| a | b |\n|---|--:|\n| 1 | `x` |": [
            ["div", ["table", ["thead", ["tr", ["th", "a"], ["th", "b"]]],
                     ["tbody", ["tr", ["td", "1"], ["td", ["code", "x"]]]]]],
        ],
    }.items():  # fmt: skip
        assert rendered(page, text)["tree"] == tree, text
    code = rendered(page, "a\n```py\nx = '<b>'\n\n# y\n```\nb")["tree"]
    assert [code[0], code[2]] == [["p", "a"], ["p", "b"]]
    assert code[1][1][1] == ["span", "py"]
    assert code[1][2] == ["pre", ["code", "x = ", ["span", "'<b>'"], "\n\n", ["span", "# y"]]]
    sql = rendered(page, "```sql\nSELECT a1 FROM b WHERE c > 1.5 -- it's\n```")["tree"][0][2][1]
    assert [each[1] for each in sql if isinstance(each, list)] == ["SELECT", "FROM", "WHERE", "1.5", "-- it's"]
    rust = rendered(page, "```rust\nfn f<'a>(x: &'a str) {} // y\n```")["tree"][0][2][1]
    assert [each[1] for each in rust if isinstance(each, list)] == ["fn", "// y"]
    assert rendered(page, "```text\nif 'a'\n```")["tree"][0][2] == ["pre", ["code", "if 'a'"]]
    unclosed = rendered(page, "```\nx")["tree"]
    assert unclosed[0][2] == ["pre", ["code", "x"]], "while it is being written"


ENDLESS = [
    "*a " * 2_000 + "a* " * 2_000, "*" * 50_000, "**a " * 10_000, "*a _b " * 10_000, "[" * 20_000, "[a](" * 10_000,
    "![" * 10_000, "`" * 50_000,
    "".join("`" * n + " " for n in range(300)), ">" * 20_000, "> " * 10_000 + "a", "- " * 5_000 + "a", "#" * 50_000,
    "# " + "# " * 20_000, "\n".join(" " * n + "- a" for n in range(500)), "|" * 20_000 + "\n" + "|-" * 20_000,
    "<" * 50_000,
    "http://" * 10_000, "http://a" + ")" * 50_000, " " * 100_000 + "a", "a\n" * 20_000, "\\" * 50_000, "&" * 50_000,
    "- a\n\n" * 5_000, "1. a\n" * 5_000, "_" * 3 + "a" * 50_000, "~~" * 20_000, "- - - a\n" * 3_000,
    "```\n" * 5_000 + "x",
    "```py\n" + "\\'" * 9_000, "```js\n" + "/*" * 9_000, "```c\n" + '"a' * 9_000, "```py\n" + "'" * 19_999,
    "```py\n" + "if " * 6_000, "```rs\n" + "'a, " * 4_000,
    "a | b\n" * 5_000, "|a|\n|-|\n" * 3_000, "> a\n\n" * 4_000,
]  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_text_does_no_harm(page: Browser, text: str) -> None:
    title = page.run("document.title")
    found = rendered(page, text)
    assert set(found["tags"]) <= set(TAGS.split())
    assert set(found["attributes"]) <= set(ATTRIBUTES.split())
    links = re.findall(r'"a ([^"]*)"', json.dumps(found["tree"]))
    assert all(each.startswith("https://a.example/") for each in links)
    assert page.run("document.title") == title
    assert page.complaints() == []


@pytest.mark.browser
def test_no_text_takes_long(page: Browser) -> None:
    for text in ENDLESS:
        found = rendered(page, text)
        if found["took"] >= 1500:  # the machine may have been busy
            found = rendered(page, text)
        assert found["took"] < 1500, f"{text[:20]!r} takes {found['took']:.0f} ms"
        assert found["depth"] < 40, text[:20]
    assert page.complaints() == []


@pytest.mark.browser
def test_what_was_drawn_stays_while_a_text_grows(page: Browser) -> None:
    """And each beginning of a text is drawn as it is alone."""
    text = RICH + "\n1. a\n2. b\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n> quote\n\nend **here**"
    same = page.run(f"""import("/assets/markdown.js").then(({{showMarkdown}}) => {{
        const grown = document.createElement("div");
        const text = {json.dumps(text)};
        let first = null;
        for (let n = 1; n <= text.length; n++) {{
            showMarkdown(grown, text.slice(0, n));
            const alone = document.createElement("div");
            showMarkdown(alone, text.slice(0, n));
            if (!grown.isEqualNode(alone)) return text.slice(0, n);
            if (n === 40) first = grown.firstChild;
        }}
        return first === grown.firstChild;
    }})""")
    assert same is True
