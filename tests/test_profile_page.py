"""The page of a profile: what is in the file and, in a real Chromium (`--browser`), what people see of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from shaderlm.errors import InputError
from shaderlm.profile.files import read
from shaderlm.profile.page import page

from .browser import Browser, pixels
from .profiles import phase, profile, slowed

HOSTILE = "</script><b id=harm>{{style}}<img src=x onerror='document.title=1'>&lt;\u2028"
SCHEMES = ("light", "dark")


def embedded(text: str) -> Any:
    """The profile out of a page, as a browser would find it."""
    found = re.search(r'<script type="application/json" id="profile">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


# The file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama-3.2-1b q4_0", HOSTILE, "<!--<script>", "a\udc80b"])
def test_the_profile_comes_back_out_of_the_page(model: str) -> None:
    given = profile(model=model)
    assert embedded(page(given)) == given


def test_the_made_up_profile_is_of_the_kind_that_is_measured(tmp_path: Path) -> None:
    """Then what the page makes of it, it makes of a measured one."""
    file = tmp_path / "profile.json"
    for given in (profile(), profile(phase(timestamps=False))):
        file.write_text(json.dumps(given), encoding="utf-8")
        assert json.loads(json.dumps(read(file).record())) == given


def test_a_hostile_name_adds_no_element() -> None:
    assert page(profile(model=HOSTILE)).count("<") == page(profile(model="calm")).count("<")


def test_the_page_is_self_contained() -> None:
    text = page(profile())
    assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|<link(?! rel=\"icon\" href=\"data:)|<script[^>]* src|fetch\(|innerHTML", text)
    assert "default-src 'none'" in text
    assert "{{" not in text


def test_every_part_of_the_page_is_in_it() -> None:
    folder = Path(__file__).parent.parent / "src" / "shaderlm" / "profile" / "assets"
    text = page(profile())
    for path in folder.iterdir():
        content = path.read_text(encoding="utf-8")
        assert len(content.splitlines()) < 400, path
        assert path.suffix == ".html" or content.strip() in text, f"{path.name} is not in the page"


def test_numbers_without_a_word_in_json_are_refused() -> None:
    with pytest.raises(InputError, match="null"):
        page(profile(phase() | {"gpu_us": float("nan")}))


# In the browser ------------------------------------------------------------------------------------------

Show = Callable[..., Browser]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def show(chromium: Browser, tmp_path: Path) -> Show:
    """Opens the page of a profile from a file; what is shown at first has raised no complaint."""

    def opened(given: dict[str, Any] | None = None, **window: Any) -> Browser:
        file = tmp_path / "report.html"
        file.write_text(page(given or profile()), encoding="utf-8")
        chromium.open(file.as_uri(), **window)
        assert chromium.complaints() == []
        return chromium

    return opened


def texts(browser: Browser, selector: str) -> list[str]:
    """The texts of all elements that a selector finds."""
    found = browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.textContent)")
    assert isinstance(found, list)
    return found


def choose(browser: Browser, name: str) -> None:
    browser.run(f"document.querySelector('#switch input[value={name}]').click()")
    assert browser.run("document.body.dataset.shown") == name


@pytest.mark.browser
def test_complaints_are_heard(chromium: Browser, tmp_path: Path) -> None:
    """What the others rely on: an exception, a warning, a refused request all count."""
    file = tmp_path / "broken.html"
    wrong = "<script>console.warn('w'); fetch('file:///none').catch(() => 0); missing()</script>"
    file.write_text(wrong, encoding="utf-8")
    chromium.open(file.as_uri())
    complaints = " ".join(chromium.complaints())
    assert "console.warning" in complaints
    assert "missing is not defined" in complaints
    assert "log: " in complaints


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [400, 500, 1280])
@pytest.mark.parametrize("slower", [1, 10_000], ids=["GPU", "software"])
def test_the_page_fits_and_nothing_complains(show: Show, scheme: str, width: int, slower: int) -> None:
    """A software adapter takes thousands of times as long: times have as many digits all the same."""
    browser = show(slowed(profile(), slower), width=width, scheme=scheme)
    for name in ("decode", "prefill"):
        choose(browser, name)
        assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
        assert browser.run(CLIPPED) == []
    assert browser.complaints() == []


# Numbers that are wider than the place that they have.
CLIPPED = """[...document.querySelectorAll('.total, .figure b, .tick, td:not(:first-child)')].filter(
    node => node.clientWidth && node.scrollWidth > node.clientWidth + 1).map(node => node.textContent)"""


@pytest.mark.browser
def test_nothing_is_requested(show: Show, tmp_path: Path) -> None:
    browser = show()
    choose(browser, "decode")
    browser.hover("[data-dispatch='20']")
    assert {url for url in browser.requests() if not url.startswith("data:")} == {(tmp_path / "report.html").as_uri()}


@pytest.mark.browser
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_every_dispatch_and_kernel_is_shown(show: Show, name: str) -> None:
    browser = show()
    choose(browser, name)
    dispatches = phase(name)["dispatches"]
    shown = browser.run("""[...document.querySelectorAll('#layers [data-dispatch]')].map(
        node => [Number(node.dataset.dispatch), node.dataset.kernel, node.getBoundingClientRect().width])""")
    assert [(index, kernel) for index, kernel, _ in shown] == [(i, d["kernel"]) for i, d in enumerate(dispatches)]
    assert all(width >= 1 for _, _, width in shown), "too thin to be seen"
    rows = {row[0]: row[1:] for row in table(browser, "by-kernel")}
    calls = {kernel: str([d["kernel"] for d in dispatches].count(kernel)) for kernel in rows}
    assert set(rows) == {d["kernel"] for d in dispatches}
    assert {kernel: row[0] for kernel, row in rows.items()} == calls
    assert texts(browser, "#layers .rows .name") == list(dict.fromkeys(d["layer"] for d in dispatches))
    drawn = browser.run("[...document.querySelectorAll('#roofline .dot')].map(node => node.dataset.kernel)")
    assert set(drawn) == {d["kernel"] for d in dispatches if d["flops"] and d["bytes"]}
    assert len(drawn) == len(set(drawn))


def table(browser: Browser, name: str) -> list[list[str]]:
    """The cells of a table's body."""
    cells = f"[...document.querySelectorAll('#{name} tbody tr')].map(row => [...row.cells].map(c => c.textContent))"
    found = browser.run(cells)
    assert isinstance(found, list)
    assert found
    return found


@pytest.mark.browser
def test_figures_by_hand(show: Show) -> None:
    """A profile of which every figure can be worked out on paper."""
    one = {"layer": "blk.0", "op": "linear", "route": "r", "kernel": "k", "workgroups": 1, "operands": ["x"]}
    dispatches = [
        one | {"us": 10, "bytes": 4_000_000, "flops": 1e6},
        one | {"us": 30, "bytes": 1_000_000, "flops": 2e8},
    ]
    step = phase(layers=1) | {"wall_us": 50, "traced_wall_us": 40, "gpu_us": 38, "timestamped_us": 40}
    step |= {"dispatches": dispatches}
    roofs = {"bytes_per_second": 1e12, "flops_per_second": 1e13, "dispatch_us": 10}
    browser = show(profile(step, roofline=roofs))
    figures = texts(browser, "#headline .figure")
    # 1 token in 50 µs; 38 of the 40 µs of the run with timestamps; 5 MB in 50 µs are 100 GB/s of 1000; 24 µs at best
    # of 38.
    assert [re.sub(r"\s+", " ", text) for text in figures] == [
        "20,000tokens/s", "95 %GPU busy", "2dispatches a step", "100GB/s over the step, 10 % of the bandwidth",
        "63 %of roofline while busy",
    ]  # fmt: skip
    lead = texts(browser, "#step .lead")[0].replace("\u00a0", " ")
    assert "A step takes 50.0 µs. In the run with timestamps it took 40.0 µs, and the GPU worked for 38.0 µs" in lead
    assert "The two runs differ" in lead
    assert "2.00 µs" in texts(browser, "#step .legend")[0].replace("\u00a0", " "), "idle in that run"
    # 5 MB and 201 MFLOP in 40 µs; (4 + 20) / 40.
    cells = ["k", "2", "40.0", "100 %", "20.0", "125", "5,025", "60 %", "16.0"]
    assert [cell.replace("\u00a0", " ") for cell in table(browser, "by-kernel")[0]] == cells
    assert browser.run("document.querySelector('#roofline .dot').classList.contains('hollow')"), "20 µs < 3 · 10 µs"


@pytest.mark.browser
def test_almost_all_is_not_all(show: Show) -> None:
    """2 ms of 2 s are idle: the share of the rest is not 100 %."""
    step = phase(layers=1, timestamps=True) | {"wall_us": 2e6, "traced_wall_us": 2e6, "gpu_us": 2e6 - 2040.0}
    step |= {"gap_us": 2040.0, "steps": 1, "timeline": phase()["timeline"][:1]}
    browser = show(profile(step))
    assert texts(browser, "#headline .figure")[1] == "99.9\u00a0%GPU busy"
    assert "2.04\u00a0ms" in " ".join(texts(browser, "#step .legend"))
    assert "mean of 1 step" in texts(browser, "#headline")[0]
    assert texts(browser, "#steps .lead")[0].startswith("1 step in the middle")


# The colour of every swatch of a legend, in OKLab: how far two of them are from each other is how different they look.
SWATCHES = """(() => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const lab = colour => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data].map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
    const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
    const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
    return [0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
      1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
      0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s];
  };
  return [...document.querySelectorAll(".legend")].map(list => [...list.querySelectorAll("li")].map(item => {
    const style = getComputedStyle(item.querySelector(".swatch"));
    return [item.querySelector(".mono").textContent, ...lab(style.backgroundColor), style.backgroundImage];
  }));
})()"""


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_of_a_legend_look_different(show: Show, scheme: str) -> None:
    """Also those of the host's parts, and of kernels that belong to no layer."""
    kernels = [
        "embedding",
        "take_rows",
        "round_rows",
        "argmax_part",
        "sample_greedy",
        "rms_norm_vec4",
        "linear_gemv_int16",
    ]
    kernels += ["attention_single_pass", "rope_kv_write", "silu_mul", "copy_vec4"]
    step = phase(layers=1)
    one = step["dispatches"][0]
    step |= {"dispatches": [one | {"kernel": name, "us": 10.0} for name in kernels]}
    step["host_us"] = dict.fromkeys(("prepare", "take", "encode", "finish", "submit", "wait"), 20.0)
    browser = show(profile(step), scheme=scheme)
    alike = []
    for legend in browser.run(SWATCHES):
        for (name, *one_lab, one_image), (other, *other_lab, other_image) in combinations(legend, 2):
            far = sum((a - b) ** 2 for a, b in zip(one_lab, other_lab, strict=True)) ** 0.5
            if far < 0.08 and one_image == other_image:
                alike.append((name, other, round(far, 3)))
    assert not alike, str(alike)


@pytest.mark.browser
def test_matrix_units_have_a_roof_of_their_own(show: Show) -> None:
    """32 MFLOP in 20 µs: 16 % of 10 TFLOP/s, 2 % of 80. The second roof is drawn where a kernel uses it."""
    one = {"layer": "blk.0", "op": "linear", "route": "r", "workgroups": 1, "operands": ["x"]}
    one |= {"us": 20, "bytes": 1000, "flops": 32e6}
    plain, units = one | {"kernel": "tile", "matrix_units": False}, one | {"kernel": "matrix", "matrix_units": True}
    roofs = {"bytes_per_second": 1e12, "flops_per_second": 1e13, "dispatch_us": 2, "matrix_flops_per_second": 8e13}
    browser = show(profile(phase(layers=1) | {"dispatches": [plain, units]}, roofline=roofs))
    shares = {row[0]: row[7].replace("\u00a0", " ") for row in table(browser, "by-kernel")}
    assert shares == {"tile": "16 %", "matrix": "2.0 %"}
    labels = texts(browser, "#roofline .roof-label")
    assert labels == ["memory 1 TB/s", "arithmetic 10 TFLOP/s", "matrix units 80 TFLOP/s"]
    heights = browser.run("[...document.querySelectorAll('#roofline .roof-label')].slice(1).map(n => n.getBBox().y)")
    assert heights[1] < heights[0], "higher"
    browser = show(profile(phase(layers=1) | {"dispatches": [plain]}, roofline=roofs))
    assert texts(browser, "#roofline .roof-label") == ["memory 1 TB/s", "arithmetic 10 TFLOP/s"]


@pytest.mark.browser
def test_light_and_dark_differ_and_are_not_blank(show: Show) -> None:
    seen = {}
    for scheme in SCHEMES:
        width, height, rows = pixels(show(scheme=scheme).screenshot())
        assert (width, height) == (1280, 900)
        step = len(rows[0]) // width
        colours = [row[i : i + 3] for row in rows for i in range(0, len(row), 4 * step)]
        assert len(set(colours)) > 40, f"{len(set(colours))} colours"
        seen[scheme] = sum(map(sum, colours)) / len(colours) / 3
    assert seen["dark"] < 80 < 180 < seen["light"], seen


# Contrast of the text of each of these with what lies behind it, by WCAG 2's formula. The canvas knows every way of
# writing a colour.
CONTRAST = """(selectors => {
  const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const channels = colour => {
    pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (channels(colour)[3] === 255) return colour;
    }
    return "white";
  };
  const luminance = colour => channels(colour).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  return selectors.flatMap(selector => [...document.querySelectorAll(selector)].map(node => {
    const style = getComputedStyle(node);
    const [a, b] = [luminance(node instanceof SVGElement ? style.fill : style.color), luminance(behind(node))];
    return [selector, node.textContent.slice(0, 30), (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
  }));
})"""
READ = [
    "h1", "h2", ".overline", ".meta", ".command", ".figure b", ".figure .soft", "#notes li", "#switch label", ".lead",
    ".seg > span", ".legend .mono", ".legend .soft", ".tick", "svg text", ".name", ".total", "th button", "td",
    "footer p", "#tip dt", "#tip dd", ".note",
]  # fmt: skip


@pytest.mark.browser
@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_can_be_read(show: Show, scheme: str) -> None:
    browser = show(scheme=scheme)
    for name in ("prefill", "decode"):
        choose(browser, name)
        browser.hover("[data-dispatch='20']")
        found = browser.run(f"{CONTRAST}({json.dumps(READ)})")
        assert {selector for selector, _, _ in found} == set(READ)
        assert not [entry for entry in found if entry[2] < 4.5]


@pytest.mark.browser
def test_a_hostile_profile_does_no_harm(show: Show) -> None:
    given = copy.deepcopy(profile(phase(layers=1), model=HOSTILE, notes=[HOSTILE], command=HOSTILE, device=HOSTILE))
    for i, dispatch in enumerate(given["phases"][0]["dispatches"]):
        dispatch.update(layer=f"{HOSTILE}{i % 3}", op=HOSTILE, kernel=f"{HOSTILE}{i % 2}", operands=[HOSTILE])
    browser = show(given)
    browser.hover("[data-dispatch='1']")
    assert texts(browser, "h1") == [HOSTILE]
    assert HOSTILE in texts(browser, "#tip")[0]
    assert browser.run("document.getElementById('harm') ?? document.querySelector('main img')") is None
    assert browser.run("document.title").startswith("</script>")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []


@pytest.mark.browser
def test_tables_sort_by_mouse_and_by_keyboard(show: Show) -> None:
    browser = show(profile(phase()))
    used = {d["kernel"] for d in phase()["dispatches"]}
    browser.run("document.querySelector('#by-kernel th[data-key=name] button').click()")
    assert [row[0] for row in table(browser, "by-kernel")] == sorted(used)
    browser.run("document.querySelector('#by-kernel th[data-key=name] button').click()")
    assert [row[0] for row in table(browser, "by-kernel")] == sorted(used, reverse=True)
    browser.run("document.querySelector('#by-kernel th[data-key=calls] button').focus()")
    for order, sign in (("descending", -1), ("ascending", 1)):
        browser.press("Enter", 13)
        calls = [int(row[1]) for row in table(browser, "by-kernel")]
        assert calls == sorted(calls, key=lambda n: sign * n)
        assert browser.run("[...document.querySelectorAll('#by-kernel th[aria-sort]')].map(n => n.ariaSort)") == [order]
    for _ in range(2):  # what has no figure stays last, both ways
        browser.run("document.querySelector('#by-kernel th[data-key=gflops] button').click()")
        column = [row[6] for row in table(browser, "by-kernel")]
        assert column.index("–") == len(column) - column.count("–") > 0


@pytest.mark.browser
def test_the_switch_changes_what_is_shown(show: Show) -> None:
    browser = show()
    assert texts(browser, "#switch label") == ["prefill", "decode"]
    before = table(browser, "by-layer"), texts(browser, "#step"), texts(browser, "#roofline"), texts(browser, "#steps")
    choose(browser, "decode")
    after = table(browser, "by-layer"), texts(browser, "#step"), texts(browser, "#roofline"), texts(browser, "#steps")
    assert all(a != b for a, b in zip(before, after, strict=True))
    choose(browser, "prefill")
    assert table(browser, "by-layer") == before[0]
    assert texts(show(profile(phase())), "#switch label") == [], "nothing to switch"


@pytest.mark.browser
def test_hovering_explains_a_dispatch(show: Show) -> None:
    browser = show(profile(phase()))
    assert browser.run("document.getElementById('tip').hidden")
    browser.hover("[data-dispatch='8']")
    said = texts(browser, "#tip")[0]
    wanted = phase()["dispatches"][8]
    assert all(wanted[key] in said for key in ("layer", "op", "route", "kernel"))
    assert all(unit in said for unit in ("µs", "GB/s", "GFLOP/s", "of roofline"))
    browser.hover("#roofline .dot[data-kernel='rope_kv_write']")
    assert "FLOP per byte" in texts(browser, "#tip")[0]
    dimmed = browser.run("[...document.querySelectorAll('#layers .dim')].map(node => node.dataset.kernel)")
    assert set(dimmed) == {d["kernel"] for d in phase()["dispatches"]} - {"rope_kv_write"}


@pytest.mark.browser
def test_arrow_keys_walk_through_the_dispatches(show: Show) -> None:
    browser = show(profile(phase()))
    browser.run("document.querySelector('#tables button').focus()")
    browser.run("document.querySelector('#layers .rows').focus()")
    for key, code, at in (("ArrowDown", 40, 1), ("ArrowRight", 39, 2), ("ArrowDown", 40, 11), ("End", 35, 147)):
        browser.press(key, code)
        assert browser.run("[...document.querySelectorAll('.seg.on')].map(n => Number(n.dataset.dispatch))") == [at]
        assert phase()["dispatches"][at]["op"] in texts(browser, "#tip")[0]


@pytest.mark.browser
def test_one_long_layer_does_not_squeeze_the_others(show: Show) -> None:
    given = phase()
    for dispatch in given["dispatches"]:
        dispatch["us"] *= 20 if dispatch["layer"] == "output" else 1
    browser = show(profile(given))
    rows = browser.run("""[...document.querySelectorAll('#layers .rows .lane')].map(row => [
        row.querySelector('.name').textContent, row.querySelector('.break') !== null,
        Math.max(...[...row.querySelectorAll('.seg')].map(seg => seg.getBoundingClientRect().right))
            - row.querySelector('.track').getBoundingClientRect().left,
        row.querySelector('.track').clientWidth])""")
    assert [name for name, broken, _, _ in rows if broken] == ["output"]
    assert all(0.6 < used / width < 1 for name, _, used, width in rows if name.startswith("blk."))
    assert all(used <= width + 1 for _, _, used, width in rows)
    assert "a scale of its own" in texts(browser, "#layers .lead")[0]


@pytest.mark.browser
def test_without_timestamps_the_page_says_what_is_missing(show: Show) -> None:
    browser = show(profile(phase(timestamps=False), clock="wall clock", software=True))
    assert "not measured" in texts(browser, "#headline")[0]
    assert "gave no timestamps" in texts(browser, "#step")[0]
    assert "no lane for the GPU" in texts(browser, "#steps")[0]
    assert "software adapter" in texts(browser, "#head")[0]
    assert len(texts(browser, "#layers [data-dispatch]")) == len(phase()["dispatches"])
    assert "NaN" not in browser.run("document.querySelector('main').innerText")
    assert "null" not in browser.run("document.querySelector('main').innerText")


@pytest.mark.browser
@pytest.mark.parametrize("width", [400, 1280])
def test_a_profile_with_next_to_nothing_in_it(show: Show, width: int) -> None:
    one = {"layer": "choose", "op": "argmax", "route": "r", "kernel": "argmax", "workgroups": 1, "operands": []}
    bare = phase() | {"dispatches": [one | {"us": 0, "bytes": 0, "flops": 0}], "timeline": [], "host_us": {}}
    cut_short = bare | {"name": "prefill", "dispatches": [], "gpu_us": None, "gap_us": None, "timestamped_us": None}
    browser = show(profile(bare, cut_short, roofline=None, notes=[]), width=width)
    assert table(browser, "by-kernel") == [["argmax", "1", "0.00", "–", "0.00", "–", "–", "–", "–"]]
    assert "no measured roofs" in texts(browser, "#roofline")[0]
    choose(browser, "prefill")
    assert "GPU time was not taken" in texts(browser, "#step")[0]
    assert "cut short" in texts(browser, "#layers")[0]
    assert browser.complaints() == []
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
