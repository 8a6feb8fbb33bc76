"""report.html as it is seen: colours, a phone, paper. axe checks contrast and names: test_page_answers.py."""

import itertools
import re
from collections.abc import Callable

import pytest

from dcpbench.core.checks import CHECKS
from support.browser import Browser
from support.colours import SIGHTS, distance
from support.pages import all_statuses, cell, four_cells

pytestmark = pytest.mark.browser


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
