"""Questions that report.html answers before a cell is opened: the verdict, changes, failed checks; that
it fits a phone; and that axe finds nothing in it that keeps anybody from reading it."""

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.records.row import Row
from dcpbench.report.show import write_reports
from dcpbench.verdict.sentences import check_sentence
from report.pages import all_statuses, cell, four_cells, many_axes, many_scenarios, write_page
from report.sweeps import folder_with
from support.browser import Browser

pytestmark = pytest.mark.browser

ENVIRONMENT = {
    "torch": "2.13.0",
    "gpus": ["NVIDIA H200"] * 4,
    "cpu_cores": 64,
    "memory_bytes": 25276502016,
    "dcpbench_commit": "932aa6fc",
}
DAY = {
    "torch_version": "2.13.0",
    "dcpbench_commit": "932aa6fc48021cb68b2f07b8b484c45faa766cd1-dirty",
    "target_commit": "5c1aa6fc48021cb68b2f07b8b484c45faa766cd1-dirty",
    "cell_s": 60.0,
}
FOUND = Mismatch(
    "net1.weight", Problem.value, "param", 0.5, {"expected": 1.0, "actual": 1.5}, Place("in step {step}", 4)
)
_FITS = """
const page = document.documentElement.scrollWidth;
const wide = [];
for (const scroller of document.querySelectorAll(".scrolls")) {
  scroller.scrollLeft = scroller.scrollWidth;
  const right = (one) => one.getBoundingClientRect().right;
  wide.push(Math.max(...[...scroller.querySelectorAll("tr > :last-child")].map(right)) - right(scroller));
}
return [page, Math.floor(Math.max(0, ...wide))];
"""

_NEXT_FRAME = "const [done] = arguments; requestAnimationFrame(() => requestAnimationFrame(done));"


def failing(**values: Any) -> Row:
    worst = [{**FOUND.plain(), "rank": 1}]
    seen = {"held": False, "control": {"a": True}, "worst": worst, "mismatch_count": 3}
    reason = check_sentence("optim_equal", "rank 1", FOUND, ["net1.weight"])
    of = {
        "status": "fail",
        "optim_equal": False,
        "reason": reason,
        "details": {"checks": {"optim_equal": seen}},
    }
    return cell("fsdp", "async", **{**of, **values})


def error_with_its_log() -> Row:
    """A row whose ranks raised a long message, which is in the log too."""
    message = "unused " * 70
    attempt = {"log_tail": ["step()", "torch.RuntimeError: Unused:", message.rstrip()]}
    reason = f"rank 0 in train: RuntimeError: Unused: {message.rstrip()}"
    checks = dict.fromkeys(("model_equal", "optim_equal"))
    return cell("tp", status="error", reason=reason, **checks, details=attempt)


def axe(browser: Browser) -> list[str]:
    """Return the violations that axe-core finds: each rule with the first element that breaks it."""
    browser.js((files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    browser.driver.set_script_timeout(120)
    found: list[str] = browser.driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(({ violations }) => done(violations.map("
        "({ id, nodes }) => `${id}: ${nodes[0].html}`)), (error) => done([String(error)]))"
    )
    return found


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (390, True)])
def test_axe_finds_no_violation(show: Callable[..., Browser], width: int, dark: bool) -> None:
    rows = [*all_statuses(), failing(cell="f", seed=1), *many_axes()[-9:]]
    browser = show(rows, before=rows[1:4], environment=ENVIRONMENT, width=width, dark=dark)
    assert axe(browser) == []
    browser.js("document.querySelector('#matrix .s-fail').click()")
    assert axe(browser) == []
    browser.js("document.querySelector('h1').innerHTML = ''; document.querySelector('main').remove()")
    assert axe(browser) != [], "it would find one"


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of some hundred cells along twelve axes, without those of one scenario under `none`."""
    rows = [one for one in many_scenarios() if (one["parallel"], one["scenario"]) != ("none", "in_place")]
    return write_page(tmp_path_factory.mktemp("night"), rows, "night", four_cells(), ENVIRONMENT)


def test_phone_reaches_every_column(browser: Browser, night: Path) -> None:
    browser.open(night, width=390, height=844)
    browser.driver.execute_async_script(_NEXT_FRAME)
    fades = "return document.querySelector('#costs .scrolls').matches('.more')"
    assert browser.js(fades), "columns are hidden"
    assert browser.js(_FITS) == [390, 0]
    browser.driver.execute_async_script(_NEXT_FRAME)
    assert not browser.js(fades), "the last column is visible"
    assert any(
        browser.js("return [...document.querySelectorAll('.scrolls')].map((it) => it.scrollWidth > 390)")
    )


def test_print_cuts_nothing_off(browser: Browser, night: Path) -> None:
    a4 = 718
    browser.open(night, width=a4, media="print")
    ends = "return [...document.querySelectorAll('main *')].map((it) => it.getBoundingClientRect().right)"
    assert max(browser.js(ends)) <= a4


def test_twelve_axes_fit(browser: Browser, night: Path) -> None:
    browser.open(night, width=1440)
    assert len(browser.all("#axis-filters details")) == 12
    heads = browser.js("return [...document.querySelectorAll('#matrix thead')].map((it) => it.offsetHeight)")
    assert len(heads) > 1, "scenarios along other axes stand apart"
    assert max(heads) < 140
    labels = browser.js("return [...document.querySelectorAll('#matrix .square')].map((it) => it.ariaLabel)")
    runs = [int(label.split()[-2]) if label.endswith(" runs") else 1 for label in labels]
    assert browser.text("#shown") == f"{sum(runs)} runs"
    gaps = browser.js("return document.querySelectorAll('#matrix .gap').length")
    assert 0 < gaps < len(labels) / 4
    assert "An empty square: this sweep has no cell there." in browser.text("#matrix")
    assert " \u2013 " not in browser.text("main")


def test_head_has_result_torch_date_and_machine(show: Callable[..., Browser]) -> None:
    starts = ("2026-11-20T02:00:00+00:00", "2026-11-20T02:40:00+00:00")
    rows = [cell("ddp", started_at=starts[0], **DAY), failing(started_at=starts[1], **DAY)]
    known = cell("hsdp", status="xfail", reason="known failure a-b: because", optim_equal=False, **DAY)
    browser = show([*rows, known], environment=ENVIRONMENT)
    assert browser.text("#verdict") == (
        "3 cells, 1 not as expected: 1 fail; as expected: 1 xfail, 1 pass. Exit status 1."
    )
    told = [one.text for one in browser.all("#origin span")]
    assert told == [
        "torch 2.13.0",
        "2026-11-20 02:00 UTC",
        "41 min",
        "4 \u00d7 NVIDIA H200",
        "target commit 5c1aa6fc4802-dirty",
        "dcpbench commit 932aa6fc4802-dirty",
    ]
    assert browser.all("#against, #changes") == [], "there is no earlier sweep"
    machine = browser.text("#environment")
    assert "memory_bytes 23.5 GiB" in machine
    assert "dcpbench commit 932aa6fc" in machine


def test_changes_since_the_sweep_before_are_listed(show: Callable[..., Browser]) -> None:
    before = [
        cell(
            "ddp",
            repeat=n,
            started_at="2026-11-19T02:00:00+00:00",
            torch_version="2.12.0",
            save_s=0.2 + n / 1e4,
        )
        for n in range(5)
    ]
    old = [*before, failing(status="pass", optim_equal=True), cell("hsdp", status="fail")]
    now = [cell("ddp", repeat=n, torch_version="2.13.0", save_s=0.3 + n / 1e4) for n in range(5)]
    browser = show([*now, failing(), cell("hsdp")], before=old)
    lines = [one.text.split("\n") for one in browser.all("#changes tbody tr")]
    texts = [" ".join(line) for line in lines]
    assert "newly failing parallel=fsdp pass \u2192 fail" in texts
    assert "newly passing parallel=hsdp fail \u2192 pass" in texts
    assert "save_s slower parallel=ddp 0.200 s \u2192 0.300 s" in texts
    assert texts.index("newly passing parallel=hsdp fail \u2192 pass") == len(texts) - 1
    against = browser.text("#against")
    assert against.startswith("Compared with before (run on 2026-11-19): 1 newly failing, 1 newly passing, ")
    assert "torch 2.12.0 \u2192 2.13.0" in against
    browser.all("#changes .link")[0].click()
    assert browser.text("#cell-title") == "parallel=fsdp,save=async,repeat=0"


def test_cells_without_a_row_are_named(browser: Browser, tmp_path: Path) -> None:
    rows = [cell("ddp"), cell("fsdp", "async")]
    folder = folder_with(tmp_path / "s", *rows)
    planned = {
        "arguments": ["parallel=ddp,fsdp"],
        "cells": {
            name: [] for name in (*(row.cell for row in rows), "save=async", "parallel=fsdp,save=sync")
        },
    }
    (folder / "sweep.json").write_text(json.dumps(planned))
    write_reports(folder, None)
    browser.open(folder / "report.html")
    assert browser.text("#verdict") == "2 cells, all as expected: 2 pass. 2 cells did not run."
    assert "save=async" in (browser.one("#verdict span").get_dom_attribute("title") or "")
    assert browser.text("#ran") == "Ran dcpbench run parallel=ddp,fsdp"


def test_page_is_made_of_rows_alone(browser: Browser, command: Command, tmp_path: Path) -> None:
    """Without a `sweep.json`, as of a script, and again of several sweeps, whose names are an axis."""
    for number, name in enumerate("ab"):
        machine = {"torch": "2.13.0", "cpu_cores": 2 + number}
        folder = folder_with(tmp_path / name, *four_cells())
        (folder / "environment.json").write_text(json.dumps(machine))
    written = tmp_path / "a/report.html"
    command(tmp_path / "a", "-o", written)
    browser.open(written)
    assert browser.text("#verdict").startswith("8 runs of 4 cells, 1 not as expected: 1 fail")
    assert [one.get_attribute("data-axis") for one in browser.all("#axis-filters details")] == [
        "parallel",
        "save",
    ]
    command(tmp_path, "-o", tmp_path / "both.html")
    browser.open(tmp_path / "both.html")
    assert browser.text("#verdict").startswith("16 runs of 8 cells, 2 not as expected: 2 fail")
    assert browser.all("#axis-filters details")[0].get_attribute("data-axis") == "sweep"
    assert browser.text(".environment thead").split() == ["a", "b"]
    browser.js("document.querySelector('#matrix .s-fail').click()")
    assert "sweep\na" in browser.text("#cell")
    assert "a/parallel=fsdp,save=async,repeat=1/rank0.log" in browser.text("#cell")
    command(tmp_path / "a", "--where", "save=sync", "-o", tmp_path / "few.html")
    browser.open(tmp_path / "few.html")
    assert browser.text("#shown") == "4 runs"


def test_check_matrix_shows_failed_checks(show: Callable[..., Browser]) -> None:
    vacuous = {"checks": {"model_equal": {"control": {"a": False}, "control_missed": ["a"]}}}
    rows = [
        *four_cells()[:4],
        failing(seed=1, cell="a"),
        cell("hsdp", status="vacuous", powered=False, details=vacuous),
        cell("ddp", seed=2, status="xfail", reason="known failure x: y", extra_equal=False, cell="b"),
        cell("ddp", seed=3, fault="lr", fault_seen=True, status="fail", gradient_close=False, cell="c"),
    ]
    browser = show(rows)
    head = [one.text.replace("\n", " ") for one in browser.all("#checks thead th")]
    assert head == ["cell", "model_equal 1 of 7", "optim_equal 1 of 7", "extra_equal 1 of 1"]
    labels = [one.accessible_name for one in browser.all("#checks .square")]
    assert "parallel=fsdp save=async seed=1: optim_equal failed" in labels
    assert "parallel=hsdp save=sync seed=0: model_equal passed, but could not have failed" in labels
    assert "parallel=ddp save=sync seed=2: extra_equal failed, a known failure" in labels
    assert len(browser.all("#checks tbody tr")) == 3, "a detected fault is not a failure"
    assert [one.text for one in browser.all("#checks .s-fail")] == ["F"]
    browser.one("#checks .s-fail").click()
    assert browser.text("#cell-title") == "a"


def test_resume_and_training_are_separate(show: Callable[..., Browser]) -> None:
    """A cell with checks of both verdicts, and a row from before there were two."""
    bounds = {"gradient_bound": "rounding_of_sum", "step_bound": "bits"}
    wrong = {"gradient_close": False, "step_equal": True, "resume": True, "training": False, **bounds}
    rows = [cell("ddp", status="fail", reason="the resume is correct", **wrong), cell("fsdp", resume=None)]
    browser = show(rows)
    head = [one.text.replace("\n", " ") for one in browser.all("#checks thead th")]
    assert head == ["cell", "training: gradient_close 1 of 1"]
    browser.one("#checks .s-fail").click()
    lines = [one.text for one in browser.all("#cell .checks tbody th")]
    training = "Training, each step compared with an unwrapped twin"
    assert lines == [
        "Resume: passed",
        "model_equal",
        "optim_equal",
        f"{training}: failed",
        "gradient_close",
        "step_equal",
    ]
    for said in ("gradient_bound", "rounding_of_sum", "step_bound", "bits"):
        assert said in browser.text("#cell")
    browser.one("#cell .close").click()
    browser.all("#matrix .square")[1].click()
    assert browser.text("#cell .checks tbody th") == "Resume"
    assert "Training" not in [one.text for one in browser.all("#cell .checks tbody th")]


def test_checks_say_what_they_prove(show: Callable[..., Browser]) -> None:
    browser = show([cell("ddp")])
    passed = browser.text("#checks .note").replace("\n", "")
    assert passed == "All 2 checks passed in every cell: model_equal, optim_equal."
    assert browser.all("#checks table") == []
    browser.one("#checks .link[popovertarget$=model_equal]").click()
    told = browser.text("#all-model_equal").split("\n")
    assert told == [
        "model_equal",
        "Proves: parameters and persistent buffers were restored bit for bit.",
        "Negative control: every value of the load target, changed before the load.",
        "Applies to scenarios that load a model; elsewhere it is null.",
    ]
    browser.one("#matrix .square").click()
    browser.one("#cell .link[popovertarget$=optim_equal]").click()
    assert browser.text("#cell-optim_equal").startswith("optim_equal\nProves: optimizer state")
    assert all(spec.control and spec.where for spec in CHECKS.values())


def test_null_checks_say_why(show: Callable[..., Browser]) -> None:
    given = {
        "ranks": [
            {
                "rank": 0,
                "notes": [{"kind": "left_out", "check": "files_equal", "text": "nothing else reads it"}],
            }
        ]
    }
    rows = [cell("ddp", details=given), cell("fsdp", status="skip", model_equal=None, optim_equal=None)]
    browser = show([*rows, cell("hsdp", status="crash", optim_equal=None)])

    def told(number: int) -> dict[str, str]:
        browser.all("#matrix .square")[number].click()
        names, texts = ([one.text for one in browser.all(f"#cell .nulls {tag}")] for tag in ("dt", "dd"))
        browser.one("#cell .close").click()
        return {name: text for some, text in zip(names, texts, strict=True) for name in some.split(", ")}

    passed, crashed = told(0), told(2)
    assert passed["files_equal"] == "nothing else reads it"
    assert passed["loss_resume_close"] == "applies to " + CHECKS["loss_resume_close"].where
    assert passed.keys() == CHECKS.keys() - {"model_equal", "optim_equal"}
    browser.all("#matrix .square")[1].click()
    assert "No check ran: the cell was skipped." in browser.text("#cell")
    assert crashed["optim_equal"] == "the cell ended as crash before, or the check does not apply"


def test_known_failures_are_folded(show: Callable[..., Browser]) -> None:
    browser = show([cell("ddp"), cell("fsdp", status="xfail", reason="known failure x: y")])
    assert browser.text("#known") == "Known failures and skips: 1 run"
    browser.one("#known summary").click()
    assert "known failure x" in browser.text("#known")
    browser.one("#search").send_keys("fsdp")
    assert "known failure x" in browser.text("#known"), "it stays open"


def test_cells_list_what_their_reason_quotes(show: Callable[..., Browser]) -> None:
    phases = {"build": 1.0, "save": 2.25, "load": 0.5}
    rows = [failing(cell_s=5.0), cell("hsdp")]
    rows[0] = failing(
        cell_s=5.0, details={**rows[0].details, "phases": phases, "rank": 1, "log_tail": ["Traceback", "x"]}
    )
    browser = show([*rows, error_with_its_log()])
    error, fail = (one.text for one in browser.all("#findings .reason"))
    assert error.endswith("unused ... (528 characters)")
    assert "optim_equal: net1.weight differs by 0.5, rank 1 (+2 more)" in fail
    browser.one("#matrix .s-error").click()
    assert browser.text("#cell").count("Unused: unused") == 1, "not in the log too"
    assert browser.text("#cell .log") == "step()\n(the message is in the reason)"
    assert "No check ran before the cell ended." in browser.text("#cell")
    browser.one("#cell .close").click()
    browser.one("#matrix .s-fail").click()
    told = browser.text("#cell")
    assert told.count("net1.weight") == 2, "in the reason, and in the mismatches of its check"
    assert "saved 1.0, restored 1.5" in browser.text("#cell .checks")
    assert "... and 2 more, counted on each rank" in browser.text("#cell .checks")
    assert "Likely cause\nThe optimizer was restored wrongly: look for" in told
    times = [one.text for one in browser.all("#cell .times td.n")]
    assert times == ["1.000 s", "2.250 s", "0.500 s", "1.250 s", "5.000 s"]
    assert "Traceback\nx" in told
    log = browser.one("#cell a")
    assert log.text == "parallel=fsdp,save=async,repeat=0/rank1.log"
    assert log.get_dom_attribute("href") == "./parallel%3Dfsdp%2Csave%3Dasync%2Crepeat%3D0/rank1.log"
