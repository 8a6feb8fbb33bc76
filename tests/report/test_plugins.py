"""A metric and a check of a plug-in: shown, compared and followed as any other, from their declarations."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from conftest import Command
from dcpbench.analysis.frame import read_sweeps
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import load_plugins
from dcpbench.report.page.data import page_data
from report.sweeps import folder_of_lines, line

PLUGIN = """
from dcpbench.core.checks import CheckSpec
from dcpbench.core.metrics import MetricSpec
from dcpbench.core.plugins import API, Plugin

shown = {"shown": "always", "compared": "always"}
plugin = Plugin(
    name="queue",
    api=API,
    columns=(
        CheckSpec("index_equal", "the index came back"),
        MetricSpec("queue_s", "waiting for the storage", history=True, better="lower", **shown),
        MetricSpec("hits", "blocks from a cache", better="higher", **shown),
    ),
)
"""


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Iterator[Callable[..., str]]:
    """Return the output of a command, with the plug-in, about six equal sweeps of three cells with five runs
    each, and a seventh that waits longer and caches less."""
    (tmp_path / "queue_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DCPBENCH_PLUGINS", "queue_plugin")
    monkeypatch.chdir(tmp_path)
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
        folder_of_lines(tmp_path / f"nights/{number}", rows)

    with mock.patch.dict(CHECKS), mock.patch.dict(METRICS):
        yield lambda *words: command(*words).out


def test_plugin_columns_are_in_every_table(report: Callable[..., str], tmp_path: Path) -> None:
    table = [row.split() for row in report("report", "nights/6", "--format", "table").splitlines()]
    assert table[1] == ["parallel", "status", "checks", "queue_s", "hits"]
    assert table[2][1:] == ["fail", "failed:", "index_equal", "0.504", "51"]
    csv = report("report", "nights/6", "--format", "csv").splitlines()
    assert {"queue_s", "hits", "index_equal"} <= set(csv[0].split(","))
    asked = ("--metric", "queue_s,hits", "--where", "index_equal=false", "--format", "table")
    pivot = report("report", "nights/6", *asked)
    assert "queue_s by parallel: median in seconds" in pivot
    assert "hits by parallel: median ±" in pivot
    assert "| queue_s | hits |" in report("report", "nights/6", "--format", "markdown")
    load_plugins()
    of_page = page_data(read_sweeps([tmp_path / "nights/6"]), [], 4000)
    assert {"queue_s", "hits", "index_equal"} <= of_page.columns.keys()


def test_plugin_metrics_are_compared(report: Callable[..., str]) -> None:
    lines = json.loads(report("compare", "nights/0", "nights/6", "--format", "json"))
    verdicts = {line["metric"]: line["verdict"] for line in lines if line["level"] == "all"}
    assert (verdicts["queue_s"], verdicts["hits"]) == ("slower", "smaller")
    text = report("compare", "nights/0", "nights/6", "--metric", "hits")
    assert "hits" in text
    assert "queue_s" not in text
    more_is_better = ("--metric", "hits", "--fail-on", "regressions")
    assert report("compare", "nights/6", "nights/0", *more_is_better)


def test_plugin_metrics_are_in_the_history(report: Callable[..., str]) -> None:
    history = json.loads(report("history", "nights", "--format", "json"))
    assert list(history["cells"][0]["costs"]) == ["save_s", "save_stall_s", "load_s", "queue_s"]
    assert history["cells"][0]["costs"]["queue_s"]["medians"][5:] == pytest.approx([0.252, 0.504])
    assert " queue_s  " in report("history", "nights")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("nowhere.a", None, " nowhere.a cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("has_no_plugin", "", " has_no_plugin: its `plugin` must be a dcpbench.core.plugins.Plugin"),
        (
            "of_later",
            PLUGIN.replace("api=API", "api=99"),
            " of_later: it is for version 99 of the contract, not for 1",
        ),
        ("declares_again", PLUGIN.replace("queue_s", "save_s"), " queue: save_s is declared already"),
    ],
)
def test_unusable_plugins_are_reported_in_one_line(
    name: str,
    text: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    if text is not None:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DCPBENCH_PLUGINS", name)
    with mock.patch.dict(CHECKS), mock.patch.dict(METRICS):
        assert command(tmp_path, status=2).refusal().startswith(f"dcpbench: plug-in{why}")
