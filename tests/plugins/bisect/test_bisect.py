"""Bisections over fake environments, which report a torch version and write given rows."""

import json
import shlex
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from conftest import ONE_STEP, TESTS, run
from dcpbench.cli.commands import main
from dcpbench.config.errors import ConfigError
from dcpbench.executors.interpreters import OtherInterpreter
from dcpbench.plugins.bisect.bisect import _cell_of
from report.sweeps import folder_with
from support.rows import row

Bisect = Callable[..., tuple[int, str, str]]
_PROGRAM = """#!{python} -S
import json
import sys
from pathlib import Path
if sys.argv[1] == "-c":
    print('"3.12.1"\\n"{version}+cpu"')
    sys.exit()
*_, repeats, folder = sys.argv
folder = Path(folder.partition("=")[2].strip("'"))
Path(folder.parent, "calls").open("a").write(" ".join(sys.argv[1:-1]) + "\\n")
if {rows!r} is None:
    sys.exit("ModuleNotFoundError: No module named 'rich'")
cells = ["a%d" % number for number in range(int(repeats.partition("=")[2]))]
record = {{"arguments": [], "cwd": "/", "cells": cells, "storage": []}}
folder.joinpath("sweep.json").write_text(json.dumps(record))
folder.joinpath("results.jsonl").write_text({rows!r})
sys.exit({status})
"""


@pytest.fixture
def bisect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bisect:
    """Bisect over environments with these rows, by version. Return the exit status and the output."""

    def run(
        environments: dict[str, object], *options: str, cell: Sequence[str] = ("parallel=ddp",)
    ) -> tuple[int, str, str]:
        words: list[str] = []
        for version, given in environments.items():
            rows = given if isinstance(given, list) else [given]
            lines = [
                json.dumps(row(cell=f"a{number}", torch_version=version, config_digest="a", **one).flat())
                for number, one in enumerate(rows)
                if one
            ]
            program = tmp_path / f"python-{version}"
            text = "".join(f"{line}\n" for line in lines) or None
            status = 1 if any(one and one["status"] != "pass" for one in rows) else 0
            filled = {"python": sys.executable, "version": version, "rows": text, "status": status}
            program.write_text(_PROGRAM.format(**filled))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
            words += ["--python", f"{version}={program}"]
        first, *_, last = environments
        usual = {"-o": str(tmp_path / "café"), "--good": first, "--bad": last}
        words += [word for option in usual.items() if option[0] not in options for word in option]
        status = main(["bisect", *cell, *words, *options])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


PASS = {"status": "pass", "reason": None}
FAIL = {"status": "fail", "reason": "model_equal: something"}


@pytest.mark.parametrize(("first_bad"), ["2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.15.0"])
def test_first_version_with_another_status_is_found(bisect: Bisect, tmp_path: Path, first_bad: str) -> None:
    versions = ["2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.15.0"]
    bad = versions.index(first_bad)
    given = {version: PASS if number < bad else FAIL for number, version in enumerate(versions)}
    status, out, _ = bisect(given)
    assert status == 0
    assert out.splitlines()[-1].startswith(f"first bad: {first_bad} (pass -> fail: ")
    calls = (tmp_path / "café" / "calls").read_text().splitlines()
    assert len(calls) <= 5, "every version was run"
    assert set(calls) == {"-m dcpbench run parallel=ddp repeats=1"}


def test_worst_run_of_several_counts(bisect: Bisect) -> None:
    status, out, _ = bisect({"2.11.0": [PASS, PASS], "2.13.0": [PASS, FAIL]}, "--repeats", "2")
    assert (status, "first bad: 2.13.0" in out) == (0, True)


def test_cost_above_the_ratio_of_medians_is_bad(bisect: Bisect, tmp_path: Path) -> None:
    def costs(*seconds: float) -> list[dict[str, object]]:
        return [{**PASS, "save_s": one} for one in seconds]

    given = {"2.11.0": costs(1, 1, 9), "2.12.0": costs(1.1, 9, 1), "2.13.0": costs(1.3, 1.25, 0.1)}
    status, out, _ = bisect(given, "--metric", "save_s", "--repeats", "3")
    assert status == 0
    assert out.splitlines()[-1] == "first bad: 2.13.0 (save_s is 1.25 times that of 2.11.0)"
    for options in (("--metric", "save_s", "--slower", "1.3"), ()):
        status, out, _ = bisect(given, *options, "--repeats", "3", "-o", str(tmp_path / f"out{len(options)}"))
        assert (status, out.splitlines()[-1]) == (1, "no bad version found: 2.13.0 is as good as 2.11.0")


def test_failing_version_is_skipped_and_reported(bisect: Bisect) -> None:
    status, out, err = bisect({"2.11.0": PASS, "2.12.0": [None], "2.13.0": FAIL})
    assert status == 0
    assert out.splitlines()[-1].endswith("; not tried before it: 2.12.0)")
    assert "torch 2.12.0: not tried: it ended with 1: ModuleNotFoundError: No module named 'rich'" in err


def test_version_with_missing_rows_is_skipped(bisect: Bisect) -> None:
    """The existing rows do not matter, whether they are good or bad."""
    given = {"2.11.0": [PASS] * 3, "2.12.0": [PASS], "2.12.1": [FAIL, PASS], "2.13.0": [FAIL] * 3}
    status, out, err = bisect(given, "--repeats", "3")
    assert status == 0
    assert "torch 2.12.0: not tried: it ended with 0 after 1 of 3 runs" in err
    assert "torch 2.12.1: not tried: it ended with 1 after 2 of 3 runs" in err
    assert out.splitlines()[-1].endswith("; not tried before it: 2.12.0, 2.12.1)")


def test_failing_first_or_last_version_is_reported(bisect: Bisect) -> None:
    status, out, err = bisect({"2.11.0": PASS, "2.13.0": FAIL}, "--bad", "2.14")
    assert (status, out) == (1, "no result: the cell could not run with both 2.11.0 and 2.14\n")
    assert "torch 2.14: not tried: it has no environment (--python)" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--good", "2.14"), "--good 2.14: must be an earlier version than --bad 2.13.0"),
        (("--good", "old"), "--good old: is not a version such as 2.13.0"),
        (("--python", "2.12.0"), "--python 2.12.0: must be VERSION=PATH"),
        (("--python", "2.12.0=/no/such/python"), "--python=/no/such/python: cannot be run: No such file"),
    ],
)
def test_invalid_arguments_are_refused_before_any_run(
    bisect: Bisect, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    status, _, err = bisect({"2.11.0": PASS, "2.13.0": FAIL}, *options)
    assert status == 2
    assert err.startswith(f"dcpbench: {message}")
    assert not (tmp_path / "café").exists()


def test_environment_with_another_torch_is_refused(bisect: Bisect, tmp_path: Path) -> None:
    bisect({"2.11.0": PASS, "2.13.0": FAIL})
    other = tmp_path / "python-2.11.0"
    status, _, err = bisect({"2.11.0": PASS, "2.13.0": FAIL}, "--python", f"2.12={other}")
    assert (status, f"--python 2.12={other}: has torch 2.11.0+cpu" in err) == (2, True)


@pytest.mark.slow
def test_cell_of_a_sweep_runs_as_its_record_specifies(tmp_path: Path) -> None:
    """The words, the folder and the groups come from the signed record; a row can change them only with
    trust."""
    one = ("parallel=none", "seed=3,4", "repeats=2", "device=cpu", "world_size=1", "saves=1", "model=short")
    ended = run(tmp_path / "sweep", *one, *ONE_STEP, "scenario=model_only", cwd=tmp_path)
    sweep, rows = ended.folder, ended.rows
    assert [row["status"] for row in rows] == ["pass"] * 4, ended.err
    name = rows[2]["cell"]
    words = ["--config-dir", str(TESTS / "conf"), *shlex.split(rows[2]["overrides"])]
    words = [word for word in words if not word.startswith("repeat")]
    cell = _cell_of([str(sweep), name])
    assert (cell.words, cell.cwd) == (words, tmp_path)
    (tmp_path / "theirs").mkdir()
    for column, theirs in (
        ("cwd", str(tmp_path / "theirs")),
        ("config_dir", str(tmp_path / "theirs")),
        ("overrides", f"{rows[2]['overrides']} model.target=evil.Model"),
    ):
        lines = [json.dumps({**row, column: theirs}) for row in rows]
        (sweep / "results.jsonl").write_text("".join(f"{line}\n" for line in lines))
        with pytest.raises(ConfigError, match=r"differs from this user's sweep\.json.* add trust=true"):
            _cell_of([str(sweep), name])
        cell = _cell_of([str(sweep), name, "trust=true"])
        assert theirs.split()[-1] in (str(cell.cwd), cell.words[1], cell.words[-1])
    record = json.loads((sweep / "sweep.json").read_text())
    record["overrides"][name].append("model.target=evil.Model")
    (sweep / "sweep.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=f"bisect {sweep}: sweep.json is not signed"):
        _cell_of([str(sweep), name])


def test_sweep_of_another_user_needs_trust(
    bisect: Bisect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows have no record, as in the first versions, or another user's. The path of an interpreter is
    relative to the current folder."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    monkeypatch.chdir(tmp_path)
    sweep = folder_with(tmp_path / "sweep", row(cwd=str(theirs), config_dir=None))
    for record in (None, {"arguments": [], "cwd": "/", "cells": ["a"], "storage": [], "signature": "0" * 64}):
        if record:
            (sweep / "sweep.json").write_text(json.dumps(record))
        status, _, err = bisect({"2.11.0": PASS, "2.13.0": FAIL}, cell=(str(sweep), "a"))
        assert (status, "; if you want that, add trust=true" in err) == (2, True)
        assert not (tmp_path / "café").exists()
    given = {"2.11.0": PASS, "2.12.0": FAIL, "2.13.0": FAIL}
    relative = ("--python", "2.12.0=./python-2.12.0")
    status, out, _ = bisect(given, *relative, cell=(str(sweep), "a", "trust=true"))
    assert (status, "first bad: 2.12.0" in out) == (0, True)


def test_other_interpreter_gets_only_dcpbench() -> None:
    ranks = OtherInterpreter(sys.executable, (), ())
    ranks._start()
    (folder,) = [entry for entry in Path(ranks._folder.name).iterdir() if entry.name == "dcpbench"]
    assert (folder / "config" / "schema.py").is_file()
    assert {entry.name for entry in folder.parent.iterdir()} == {"dcpbench", "hydra_plugins"}
    ranks.end()
    assert not folder.parent.exists()
