"""Values of rows are text wherever they are shown: no terminal, Markdown viewer or spreadsheet obeys it."""

import csv
import io
import json
from pathlib import Path

import pytest

from adversary.hostile import ESCAPES
from conftest import Command
from dcpbench.config.text import visible
from dcpbench.records.store import write_csv
from report.sweeps import cell, folder_with
from support.rows import row

FORMULAS = (
    "=1+1",
    "+cmd|' /C calc'!A0",
    "-2+3+cmd",
    "@SUM(1)",
    " =1",
    "\t=1",
    "\uff1d1+1",
    "=\x1b[2J",
)
CONTROLS = [sign for sign in ESCAPES if not sign.isprintable()]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A row of escapes in every text, and one for each formula; the folder has a name of that kind too."""
    fields = (
        "cell",
        "reason",
        "scenario",
        "parallel",
        "model",
        "overrides",
        "torch_version",
        "first_mismatch",
    )
    bad = row(**{**dict.fromkeys(fields, ESCAPES), "status": f"fail{ESCAPES}"})
    rows = [
        cell(str(number), reason=text, status="fail") for number, text in enumerate((*FORMULAS, "-1.5e3"))
    ]
    folder = folder_with(tmp_path / f"[red]sweep[/nothing]{ESCAPES}".replace("/", "|"), bad, *rows)
    (folder / "environment.json").write_text(json.dumps({"torch": ESCAPES, ESCAPES: "=1"}))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        "report S",
        "report S --cells",
        "report S --format=markdown",
        "report S --format=csv",
        "compare S S",
        "history S",
    ],
)
def test_nothing_in_a_report_is_obeyed_by_a_terminal(words: str, sweep: Path, command: Command) -> None:
    printed = command(*(sweep if word == "S" else word for word in words.split()))
    for text in (printed.out, printed.err):
        assert not [sign for sign in CONTROLS if sign in text.replace("\n", "")]
        assert not any(line.startswith("[9/9]") for line in text.splitlines()) or "csv" in words


def test_a_spreadsheet_runs_no_text_and_numbers_stay_numbers(sweep: Path, command: Command) -> None:
    """Neither in what `report` prints nor in the sweep's own results.csv."""
    printed = command(sweep, "--format=csv").out
    write_csv(sweep)
    own = (sweep / "results.csv").read_bytes().decode()
    for written in (printed, own):
        lines = list(csv.DictReader(io.StringIO(written, newline="")))[1:]
        texts = [f"'{visible(text, but=chr(9))}" for text in FORMULAS]
        assert [line["reason"] for line in lines] == [*texts, "-1.5e3"]
        assert {line["seed"] for line in lines} == {"0"}
