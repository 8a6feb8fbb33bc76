"""A metric and a check of a plug-in: shown, compared and followed as any other, from their declarations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from report.sweeps import folder_of_lines, line
from support.browser import Browser
from support.drivers import environment

pytestmark = pytest.mark.slow

PLUGIN = """
from dcpbench.core.checks import CheckSpec
from dcpbench.core.metrics import MetricSpec
from dcpbench.core.plugins import API, Plugin

shown = {"shown": "always", "compared": "always"}
plugin = Plugin(
    name="queue",
    api=API,
    checks=(CheckSpec("index_equal", "the index came back"),),
    metrics=(
        MetricSpec("queue_s", "waiting for the storage", history=True, better="lower", **shown),
        MetricSpec("hits", "blocks from a cache", better="higher", **shown),
    ),
)
"""


@pytest.fixture
def sweeps(tmp_path: Path) -> Path:
    """Six equal sweeps of three cells with five runs each; the seventh waits longer and caches less."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "queue_plugin.py").write_text(PLUGIN)
    for number in range(7):
        changed = number == 6
        rows = [
            line(
                cell=f"parallel={parallel},repeat={repeat}",
                parallel=parallel,
                overrides=f"parallel={parallel} repeat={repeat}",
                repeat=repeat,
                started_at=f"2026-11-0{number + 1}T00:00:00+00:00",
                queue_s=(0.25 + 0.001 * repeat) * (2 if changed else 1),
                hits=(100 + repeat) * (0.5 if changed else 1),
                index_equal=not changed,
                status="fail" if changed and parallel == "none" else "pass",
            )
            for repeat in range(5)
            for parallel in ("none", "ddp", "fsdp")
        ]
        folder_of_lines(tmp_path / "nights" / f"{number}", rows)
    return tmp_path / "nights"


def report(sweeps: Path, *arguments: str) -> str:
    """Return the output of a command, of `report` if none is named, in a process with the plug-in."""
    named = [] if arguments[0] in ("compare", "history") else ["report"]
    ended = subprocess.run(
        [sys.executable, "-m", "dcpbench", *named, *arguments],
        cwd=sweeps,
        env=environment(sweeps.parent / "site", DCPBENCH_PLUGINS="queue_plugin"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_plugin_columns_are_in_every_table(sweeps: Path) -> None:
    table = [row.split() for row in report(sweeps, "6", "--format", "table").splitlines()]
    assert table[0] == ["all", "cells:", "compile=false", "save=sync"]
    assert table[1] == ["parallel", "status", "checks", "queue_s", "hits"]
    assert table[2][1:] == ["fail", "failed:", "index_equal", "0.504", "51"]
    csv = report(sweeps, "6", "--format", "csv").splitlines()
    assert {"queue_s", "hits", "index_equal"} <= set(csv[0].split(","))
    pivot = report(
        sweeps, "6", "--metric", "queue_s,hits", "--where", "index_equal=false", "--format", "table"
    )
    assert "queue_s by parallel: median in seconds" in pivot
    assert "hits by parallel: median ±" in pivot
    assert "| queue_s | hits |" in report(sweeps, "6", "--format", "markdown")


@pytest.mark.browser
def test_plugin_columns_are_on_the_page(sweeps: Path, browser: Browser) -> None:
    report(sweeps, "6", "-o", "page.html")
    browser.open(sweeps / "page.html")
    assert "queue" in browser.text("#costs thead")
    assert "504 ms" in browser.text("#costs tbody")
    browser.all("#matrix .square")[0].click()
    cell = browser.text("#cell")
    assert "index_equal\nNO" in cell.replace(" NO", "\nNO")
    assert "queue_s" in cell
    assert "hits" in cell


def test_plugin_metrics_are_compared(sweeps: Path) -> None:
    lines = json.loads(report(sweeps, "compare", "0", "6", "--format", "json"))
    verdicts = {line["metric"]: line["verdict"] for line in lines if line["level"] == "all"}
    assert (verdicts["queue_s"], verdicts["hits"]) == ("slower", "smaller")
    text = report(sweeps, "compare", "0", "6", "--metric", "hits")
    assert "hits" in text
    assert "queue_s" not in text
    assert report(sweeps, "compare", "6", "0", "--metric", "hits", "--fail-on", "regressions"), (
        "more is better"
    )


def test_plugin_metrics_are_in_the_history(sweeps: Path) -> None:
    history = json.loads(report(sweeps, "history", ".", "--format", "json"))
    assert list(history["cells"][0]["costs"]) == ["save_s", "save_stall_s", "load_s", "queue_s"]
    assert history["cells"][0]["costs"]["queue_s"]["medians"][5:] == pytest.approx([0.252, 0.504])
    assert " queue_s  " in report(sweeps, "history", ".")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("nowhere.to_be_found", None, "plug-in nowhere.to_be_found cannot be imported"),
        ("mine", "", "plug-in mine: its `plugin` must be a dcpbench.core.plugins.Plugin"),
        ("mine", PLUGIN.replace("queue_s", "save_s"), "plug-in queue: save_s is declared already"),
    ],
)
def test_unusable_plugins_are_reported_in_one_line(
    tmp_path: Path, name: str, text: str | None, why: str
) -> None:
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "dcpbench", "report", str(tmp_path)],
        env=environment(tmp_path, DCPBENCH_PLUGINS=name),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"dcpbench: {why}")
    assert ended.stderr.count("\n") == 1
