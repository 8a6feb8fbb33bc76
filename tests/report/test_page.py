"""report.html in a real browser: it shows what rows say, by mouse and keyboard, and runs nothing of it. In
colours that differ, on a phone and on paper: axe checks contrast and names in test_page_answers.py."""

import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from dcpbench.config.text import size_text
from dcpbench.core.checks import CHECKS
from dcpbench.records.row import Row
from report.colours import SIGHTS, distance
from report.pages import SIZES, all_statuses, cell, four_cells, many_axes, many_scenarios, write_page
from support.browser import Browser

pytestmark = pytest.mark.browser

HOSTILE = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'><!-- <b>bold</b> "
    "\u2028 \x00 \x1b[31m \u202e \ud800 \"quoted\" 'so' &amp; end"
)
FAULTS = ("lr", "bias", "shard")


def squares(browser: Browser) -> list[str]:
    return [one.get_attribute("aria-label") or "" for one in browser.all("#matrix .square")]


def test_squares_show_the_worst_run(show: Callable[..., Browser]) -> None:
    browser = show(four_cells())
    assert squares(browser) == [
        "ddp, sync: pass, 2 runs",
        "ddp, async: pass, 2 runs",
        "fsdp, sync: pass, 2 runs",
        "fsdp, async: fail, 1 of 2 runs",
    ]
    assert browser.text("#verdict") == (
        "8 runs of 4 cells, 1 not as expected: 1 fail; as expected: 7 pass. Exit status 1."
    )
    assert browser.all("#matrix .s-fail")[0].text == "F1/2"
    assert "optim_equal: rank 0: it differs" in browser.text("#findings")
    # Filters select runs, and set the address.
    browser.one('.chip[data-status="fail"]').click()
    assert squares(browser) == ["fsdp, async: fail"]
    assert browser.text("#shown") == "1 of 8 runs"
    assert browser.js("return location.hash") == "#status=fail"
    browser.one('.chip[data-status="fail"]').click()
    browser.one('#axis-filters [data-axis="parallel"] summary').click()
    browser.one('#axis-filters input[value="ddp"]').click()
    assert [one.split(":")[0] for one in squares(browser)] == ["ddp, sync", "ddp, async"]
    browser.one("#search").send_keys("save=async repeat=1")
    assert browser.text("#shown") == "1 of 8 runs"
    browser.one("#search").send_keys(" nowhere")
    assert squares(browser) == []
    assert "No run fits these filters." in browser.text("#nothing")
    browser.one("#reset-all").click()
    assert len(squares(browser)) == 4
    assert browser.text("#shown") == "8 runs"
    browser.one("#search").send_keys("it differs")
    assert len(squares(browser)) == 1, "reasons are searched as well"


def test_addresses_restore_filters_and_cell(show: Callable[..., Browser]) -> None:
    wanted = "cell=parallel%3Dfsdp%2Csave%3Dasync%2Crepeat%3D1&axis.parallel=fsdp"
    browser = show(four_cells(), at=wanted)
    assert browser.text("#cell-title") == "parallel=fsdp,save=async,repeat=1"
    browser.press(Keys.ESCAPE)
    assert squares(browser) == ["fsdp, sync: pass, 2 runs", "fsdp, async: fail, 1 of 2 runs"]
    assert browser.focused() == "fsdp, async: fail, 1 of 2 runs"
    assert "cell=" not in browser.js("return location.hash")


def test_wide_sweeps_are_folded_and_faults_stay_apart(show: Callable[..., Browser]) -> None:
    """Which axes: analysis/test_differing.py."""
    browser = show(many_axes())
    assert browser.text("#matrix .note").startswith("Folded: ")
    counts = [int(label.split()[-2]) if "runs" in label else 1 for label in squares(browser)]
    assert sum(counts) == 96, "each run without a fault stands in one square"
    planted = [one.accessible_name for one in browser.all("#faults .square")]
    assert planted == [
        f"{fault}, {parallel}: fault detected" for fault in FAULTS for parallel in ("ddp", "fsdp")
    ]
    browser.js("document.querySelector('#faults .square').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ENTER)
    assert browser.text("#cell-title") == "parallel=ddp,fault=bias,model=even,world_size=4"


def test_cells_open_by_mouse_and_return_the_focus(show: Callable[..., Browser]) -> None:
    browser = show(four_cells())
    browser.all("#matrix .square")[3].click()
    told = browser.text("#cell")
    for said in ("fail", "optim_equal", "NO", "3 of 4", "layer.bias", "200 ms", "3.7 GiB"):
        assert said in told
    for metric, size in SIZES.items():
        assert f"{metric}\n{size_text(size)}" in told, "sizes as in the terminal"
    assert "replicas_equal\napplies to layouts in which several ranks have the same part of a tensor" in told
    assert browser.text("#cell .again code") == "dcpbench run parallel=fsdp save=async repeat=1"
    assert len(browser.all("#cell .losses .c-resumed polyline")) == 2
    assert browser.js("return document.querySelector('#cell .c-continued polyline').points.length") == 8
    assert [one.text.split("\n")[-1] for one in browser.all("#cell .siblings button")] == [
        "repeat 0",
        "repeat 1",
    ]
    browser.all("#cell .siblings button")[0].click()
    assert browser.text("#cell-title") == "parallel=fsdp,save=async,repeat=0"
    browser.one("#cell .close").click()
    assert browser.all("#cell") == []
    assert browser.focused() == "fsdp, async: fail, 1 of 2 runs"
    browser.all("#findings .link")[0].click()
    browser.driver.back()
    assert browser.all("#cell") == [], "Back closes what was opened"
    assert browser.focused() == "parallel=fsdp save=async", "it was opened by its name"


def test_keyboard_reaches_everything(show: Callable[..., Browser]) -> None:
    browser = show(four_cells())
    stops = []
    for _ in range(60):
        browser.press(Keys.TAB)
        stops.append(browser.focused())
        if stops[-1].startswith("ddp, sync"):
            break
    assert stops[-1] == "ddp, sync: pass, 2 runs", stops
    assert browser.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    assert browser.focused() == "fsdp, async: fail, 1 of 2 runs"
    browser.press(Keys.ENTER)
    assert browser.js("return document.querySelector('#cell').contains(document.activeElement)")
    for _ in range(12):
        browser.press(Keys.TAB)
        assert browser.js("return !document.querySelector('main').contains(document.activeElement)")
    browser.press(Keys.ESCAPE)
    assert browser.all("#cell") == []
    assert browser.focused() == "fsdp, async: fail, 1 of 2 runs"
    browser.press(Keys.HOME)
    assert browser.focused() == "fsdp, sync: pass, 2 runs"


def test_commands_are_copied(show: Callable[..., Browser]) -> None:
    asked = ["model.options={a:'it is \"so\"'}", "parallel=ddp"]
    browser = show([cell("ddp", overrides=shlex.join(asked))])
    grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.driver.execute_cdp_cmd("Browser.grantPermissions", grant)
    browser.one("#matrix .square").click()
    browser.one("#cell .copy").click()
    read = (
        "const [done] = arguments; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
    )
    copied = browser.driver.execute_async_script(read)
    assert shlex.split(copied) == ["dcpbench", "run", *asked]


def test_texts_of_rows_stay_text(show: Callable[..., Browser], tmp_path: Path) -> None:
    rows = [
        cell(
            HOSTILE, status="error", reason=HOSTILE, details={"log_tail": [HOSTILE], "doing": {"0": HOSTILE}}
        ),
        cell(
            "ddp",
            overrides=f"parallel=ddp model={HOSTILE}",
            details={"checks": {HOSTILE: {"worst": [HOSTILE]}}},
        ),
    ]
    browser = show(rows, title=HOSTILE)
    browser.all("#matrix .square")[0].click()
    told = browser.text("#cell")
    assert (
        "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'><!-- <b>bold</b>" in told
    )
    assert "\\u2028 \u2400 \u241b[31m \\u202e" in told
    assert browser.js("return window.ran") is None
    assert browser.js("return document.querySelectorAll('img, b b, #cell b').length") == 0
    assert browser.console() == []
    assert (tmp_path / "report.html").read_bytes().isascii()
    assert "<img" not in (tmp_path / "report.html").read_text()
    inject = """
    document.body.insertAdjacentHTML("beforeend", `<img src="https://127.0.0.1/x" onerror="window.ran = 1">`);
    document.body.append(Object.assign(document.createElement("script"), { textContent: "window.ran = 1" }));
    """
    browser.js(inject)
    browser.driver.execute_async_script("const [done] = arguments; setTimeout(done, 0)")
    assert browser.js("return window.ran") is None
    assert "Content Security Policy" in " ".join(browser.console())


def test_page_of_rows_without_measurements(show: Callable[..., Browser], tmp_path: Path) -> None:
    old = {"device": None, "world_size": None, "model_equal": None, "optim_equal": None}
    rows = [
        cell("ddp", **old, save_s=float("nan"), details={"checks": None, "ranks": [None]}),
        cell("odd", status="new"),
    ]
    browser = show(rows)
    assert [one.split(":")[1].split(",")[0] for one in squares(browser)] == [" pass", " new"]
    for square in (0, 1):
        browser.all("#matrix .square")[square].click()
        browser.press(Keys.ESCAPE)
    assert "Not recorded" in browser.text("#environment")
    assert browser.console() == []
    (tmp_path / "empty").mkdir()
    assert "This sweep has no rows yet." in write_page(tmp_path / "empty", []).read_text()


def test_page_of_thousands_of_rows_is_small(show: Callable[..., Browser], tmp_path: Path) -> None:
    rows = [json.loads(json.dumps(one.flat())) for one in many_scenarios()]
    seeds = [
        {**one, "seed": seed, "cell": f"{one['cell']},seed={seed}"} for seed in range(16) for one in rows
    ]
    seeds[0] |= {"status": "fail", "reason": "long " * 1200}
    browser = show([*map(Row.of, seeds)], width=1440)
    assert len(seeds) > 5000
    assert (tmp_path / "report.html").stat().st_size < 1_000_000
    assert browser.js("return document.querySelectorAll('*').length") < 20_000
    assert browser.text("#shown") == f"{len(seeds)} runs"
    browser.one("#findings .link").click()
    assert "more characters in results.jsonl or details.jsonl" in browser.text("#cell .reason")


def test_environment_shows_what_a_resume_changed(show: Callable[..., Browser]) -> None:
    code = {"my_gpt": {"commit": None, "digest": "45d7", "files": {"my_gpt.py": "0"}}}
    now: dict[str, Any] = {"torch": "2.13", "cpu_cores": 2, "target_commit": "2" * 40, "code": code}
    earlier = [{"cpu_cores": 8, "target_commit": "1" * 40}]
    browser = show([cell("ddp")], environment=now | {"earlier": earlier})
    assert browser.text(".environment thead").split() == ["now", "earlier", "(1)"]
    rows = {row.text.split()[0]: row.text for row in browser.all(".environment tbody tr")}
    assert rows["torch"].split() == ["torch", "2.13", "as", "now"]
    assert rows["cpu_cores"].split() == ["cpu_cores", "differs", "2", "8"]
    assert rows["target"].split() == ["target", "commit", "differs", "2" * 40, "1" * 40]
    assert rows["source"].split() == ["source", "of", "my_gpt", "45d7", "as", "now"]


def test_page_without_scripts_has_a_table(browser: Browser, tmp_path: Path) -> None:
    written = write_page(tmp_path, all_statuses())
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.driver.get(written.resolve().as_uri())
        told = browser.text("body")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "12 cells, 8 not as expected: 1 fault missed, 1 crash, " in told
    assert "it was crash" in told
    assert "Search" not in told


@pytest.mark.parametrize("dark", [False, True])
def test_colours_follow_the_reader_and_differ(show: Callable[..., Browser], dark: bool) -> None:
    """Also for the colour-blind, and no status is told by its colour alone."""
    browser = show(all_statuses(), dark=dark)
    dim = browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dim == dark
    colours = {}
    for square in browser.all(".square"):
        parts = re.findall(r"\d+", square.value_of_css_property("background-color"))
        colours[square.text] = tuple(map(int, parts[:3]))
    assert len(colours) == 12
    # A fault that was detected looks like a pass, one that was missed like a fail: letters tell them apart.
    assert (colours.pop("D"), colours.pop("M")) == (colours["P"], colours["F"])
    near = [
        (sight, one, other, distance(colours[one], colours[other], sight))
        for sight in SIGHTS
        for one, other in itertools.combinations(colours, 2)
    ]
    assert [found for found in near if found[-1] < 10] == []
    browser.one("#theme").click()
    assert (browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)") != dark
    browser.js("localStorage.clear()")


def test_page_fits_a_phone(show: Callable[..., Browser]) -> None:
    control = {f"layer{number}": True for number in range(288)}
    seen = {"control": control, "control_missed": [], "mismatch_count": 282}
    made = {
        "status": "fail",
        "reason": "x" * 600,
        "details": {"checks": dict.fromkeys(CHECKS, seen)},
        **dict.fromkeys(CHECKS, False),
    }
    seeds = [cell("fsdp", seed=seed, cell=f"parallel=fsdp,seed={seed}", **made) for seed in range(30)]
    browser = show([*seeds, *four_cells()], width=390, height=844)
    wide = "return document.documentElement.scrollWidth"
    assert browser.js(wide) == 390
    browser.all("#matrix .square")[0].click()
    assert browser.js(wide) == 390
    hidden = "const it = document.querySelector(arguments[0]); return it.scrollWidth - it.clientWidth"
    assert (browser.js(hidden, "#cell"), browser.js(hidden, "#cell .scrolls")) == (0, 0)
    names = "return [...document.querySelectorAll('.link[popovertarget]')]"
    thickness = f"{names}.map((it) => [it.textContent, Math.min(it.offsetWidth, it.offsetHeight)])"
    lines = browser.js(thickness)
    assert {name for name, _ in lines} == CHECKS.keys()
    assert [(name, height) for name, height in lines if height > 30] == [], "a name has one line"
    browser.one("#cell .close").click()
    browser.all("#checks th .link[popovertarget]")[0].click()
    explained = browser.one("#checks .explained:popover-open")
    assert explained.size["width"] > explained.size["height"], "its text is not turned as the head is"


def test_print_is_light_without_controls(show: Callable[..., Browser]) -> None:
    browser = show(four_cells(), dark=True, media="print")
    assert browser.js("return getComputedStyle(document.body).backgroundColor") == "rgb(251, 251, 250)"
    assert browser.all("#search, #theme, .menu, #reset, .choice") == []
    assert len(browser.all("#matrix .square")) == 4
    browser.emulate(dark=True)
    browser.all("#matrix .square")[3].click()
    browser.emulate(dark=True, media="print")
    assert browser.all("#matrix, .copy, .close") == [], "an open cell is printed alone"
    assert "3 of 4" in browser.text("#cell")


def test_costs_have_dots_and_can_be_sorted(show: Callable[..., Browser]) -> None:
    slow = cell("hsdp", save_s=2.0, load_s=None)
    untimed = cell("ddp", repeat=2, **dict.fromkeys(("save_s", "save_stall_s", "load_s")))
    browser = show([*four_cells(), slow, untimed])
    first = browser.all("#costs tbody tr")[0]
    assert first.text.split("\n") == [
        "parallel=ddp save=sync 2 of 3",
        "200 ms",
        "50.0 ms",
        "100 ms",
        "18.6 GiB/s",
        "37.3 GiB/s",
    ]
    assert "n of m: the other runs have no times" in browser.text("#costs .note")
    assert "n/m: n of m runs have this status" in browser.text("#matrix .note")
    assert browser.js("return arguments[0].querySelectorAll('td:nth-child(4) .dot').length", first) == 2
    assert browser.js("return document.querySelectorAll('.dot.hollow').length") == 5, (
        "of the one run that failed"
    )
    browser.one('#costs [data-sort="save_s"]').click()
    assert browser.all("#costs tbody th")[0].text == "parallel=hsdp save=sync"
    assert "\u2013" in browser.all("#costs tbody tr")[0].text, "a value that was not measured is not a number"


def test_costs_have_axes_with_numbers_and_limits(show: Callable[..., Browser]) -> None:
    """Costs that span more than two powers of ten, and rates beside those of plain files."""
    raw = {"raw_write_s": 0.15, "raw_read_s": 0.01}
    small = cell("ddp", save_s=0.002, checkpoint_bytes=4_000_000)
    rows = [small, cell("fsdp", **raw), cell("fsdp", repeat=1, save_s=2.0, **raw)]
    browser = show(rows)
    names = [one.text.split(" \u2191")[0] for one in browser.all("#costs [data-sort]")]
    assert names[:3] == ["save_s", "save_stall_s", "load_s"], "as in results.csv"
    axis = """return [...document.querySelectorAll("#costs thead th")].map(
        (head) => [...head.querySelectorAll("text")].map((it) => it.textContent))"""
    assert browser.js(axis)[2] == ["1 ms", "100 ms", "10 s"]
    assert browser.one("#log").is_selected()
    tips = browser.js(
        "return [...document.querySelectorAll('#costs .dot title')].map((it) => it.textContent)"
    )
    assert {"save_s 2.00 ms, pass", "save_s 2.00 s, pass, repeat 1"} <= {*tips}
    assert [one.text for one in browser.all("#costs tbody th")] == ["parallel=ddp", "parallel=fsdp"], (
        "constant axes are left out"
    )
    without, measured = browser.all("#costs tbody tr")
    assert "of raw" not in without.text
    assert measured.text.split("\n")[-1] == "10 % of raw"
    assert browser.js("return document.querySelectorAll('#costs .limit').length") == 2
    browser.one("#log").click()
    assert (browser.js(axis)[2][0], browser.js(axis)[-1][-1]) == ("0", "384 GiB/s"), "it reaches the limit"
    assert "scale=linear" in browser.js("return location.hash")
