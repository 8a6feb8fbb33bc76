"""Wrong words of a run, which Hydra would misread or report in its own terms, and those about sweeps."""

import re
import shlex
from pathlib import Path

import pytest

from conftest import TESTS, Command
from dcpbench.cli import run
from dcpbench.cli.words import parse_words
from dcpbench.config.groups import ParallelConfig
from dcpbench.sweep.folder import SweepRecord
from report.sweeps import cell, folder_of_lines, folder_with


def test_words_with_meaning_are_accepted() -> None:
    parse_words(
        ['storage.root="a, b"', "parallel=choice(ddp,fsdp)", "model.options={a:[1,2]}", "seed=1,2", "~fault"]
    )
    parse_words(["parallel=ddp", "parallel@load=ddp", "parallel@other=ddp"])
    parse_words(["workload.target=mine.build", "load_python=/venv/bin/python3.12", "parallel=glob(fsdp*)"])


def test_value_with_a_dot_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "gpt2.small.yaml").write_text("target: x.y\n")
    parse_words(["model=gpt2.small", "model@other=mine"], config_dir=tmp_path)
    parse_words(["model=mine"], config_dir=TESTS / "conf")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("fsdp2,", "fsdp2,: not a command and not key=value; did you mean parallel=fsdp2?"),
        (
            "parallel=fsdp,fsdp2, save=sync",
            "parallel=fsdp,fsdp2,: ends with a comma; write parallel=fsdp,fsdp2",
        ),
        ("parallel=fsdp,,fsdp2", "lacks a value next to a comma; write parallel=fsdp,fsdp2"),
        ("parallel=,", "parallel=,: has no value"),
        ("parallel=", "parallel=: has no value"),
        ("parallel= ddp", "parallel=: has no value; write parallel=ddp, without a space"),
        ("parallel = ddp", "parallel: not a command and not key=value; write parallel=fsdp"),
        ("=ddp", "=ddp: has no key in front of the ="),
        ("hydra.mode=RUN", "hydra.mode=RUN: dcpbench starts cells itself, in hydra.sweep.dir; leave it out"),
        ("hydra.run.dir=elsewhere", "hydra.run.dir=elsewhere: dcpbench starts cells itself"),
        ("hydra/sweeper=basic", "hydra/sweeper=basic: dcpbench starts cells itself"),
        ("parallel=[ddp", "has a [ without a closing ]"),
        ("parallel=ddp)", "has a ) without a ("),
        ("parallel=choice(ddp,fsdp", "has a ( without a closing )"),
        ('storage.root="a,b', 'has a " without a closing "'),
        ("parallel=chioce(ddp,fsdp)", "is not a call of one of Hydra's functions"),
        ("storage.root=~/é", "has characters that need quotes; write 'storage.root=\"~/é\"'"),
        ("parallel=null", "parallel=null: cannot be null; leave it out"),
        ("parallel=ddp resume='out/x'", "resume='out/x': not a key; write dcpbench resume out/x"),
        ("+resume=out", "resume=out: not a key; write dcpbench resume out"),
        ("plan=true", "plan=true: not a key; write dcpbench plan"),
        ("plan_as=json", "plan_as=json: not a key; write dcpbench plan --format"),
        ("tiny.build", "tiny.build: not a command and not key=value; your model: workload.target=tiny.build"),
        ("tiny.py", "your model: workload.target=tiny.build"),
        (
            "parallel=ddp saves=1 parallel=fsdp2",
            "parallel=fsdp2: parallel is given twice (first parallel=ddp); leave one out, or write "
            "parallel=ddp,fsdp2 for both\n",
        ),
        ("seed=1,2 saves=1 seed=3", "seed=3: seed is given twice (first seed=1,2); leave one out, or write"),
        (
            "train_steps=1 ++train_steps=1",
            "++train_steps=1: train_steps is given twice (first train_steps=1)",
        ),
        ("hydra.sweep.dir=a hydra.sweep.dir=b", "hydra.sweep.dir is given twice (first hydra.sweep.dir=a)"),
        ("parallel@x=ddp parallel@x=ddp", "parallel@x is given twice (first parallel@x=ddp)"),
        ("retry=1 retry=0", "retry=0: retry is given twice (first retry=1); leave one out\n"),
        ("~fault ~fault", "~fault: fault is given twice (first ~fault); leave one out\n"),
        ("compre a b", "compre: not a command and not key=value; did you mean dcpbench compare?"),
        ("fsdp", "fsdp: not a command and not key=value; did you mean parallel=fsdp?"),
        ("FSDP2", "did you mean parallel=fsdp2?"),
        ("train_step", "did you mean train_steps=0?"),
        ("xyzzy", "see dcpbench --help"),
        ("run parallel=ddp hsdp2", "did you mean parallel=hsdp2?"),
        ("run parallel=ddp report", "report: a command has to come first: dcpbench report ..."),
        ("run --config_dir own", "--config-dir"),
        ("run --help scenaro", "--help scenaro: no such axis or key; did you mean scenario?"),
        ("resume", "name the folder of the sweep first"),
        ("run --cfg", "requires an argument"),
        ("report", "Missing argument 'SWEEP...'"),
        ("report compare", "compare: no such folder; did you mean dcpbench compare?"),
        ("report /nowhere", "/nowhere: no sweep here"),
        ("report . --metrc save_s", "No such option '--metrc'"),
        ("report . status!=pass", "status!=pass: no such folder; a condition is written after --where"),
        ("report . --format csv -o x --format json", "--format is given 2 times; leave one out"),
        ("report . --format jsn", "'jsn' is not one of 'table', 'markdown'"),
        ("history . --last 0", "0 is not in the range x>=1"),
        ("\x1b[31mfsdp\x1b[0m", r"\x1b[31mfsdp\x1b[0m: not a"),
        ("plan resume", "resume: to plan a resume: dcpbench plan --resume FOLDER"),
        ("plan outputs/x", "to plan a resume: dcpbench plan --resume outputs/x"),
        ("plan night", "to plan a resume: dcpbench plan --resume night"),
        ("run outputs/x", "to resume a sweep: dcpbench resume outputs/x"),
        ("outputs/x", "to resume a sweep: dcpbench resume outputs/x"),
        ("resum outputs/x", "resum: not a command and not key=value; did you mean dcpbench resume?"),
        ("run parallel=ddp,fsdp --cfg job", "parallel=ddp,fsdp: --cfg prints one cell; pass one value"),
        ("--", "--: not a command and not key=value; see dcpbench --help"),
        ("run --help tust", "--help tust: no such axis or key; choose one of"),
        ("--parallel ddp", "--parallel: write parallel=ddp"),
        ("run seed=1 --world-size 4", "--world-size: write world_size=4"),
        ("run --resume old", "--resume: not an option of this command; write dcpbench resume old"),
        ("resume old --plan", "--plan: not an option of this command; write dcpbench plan"),
        ("run --timeouts.cell_s", "--timeouts.cell_s: write timeouts.cell_s=VALUE"),
    ],
)
def test_wrong_words_get_one_line_with_a_hint(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.setattr(run, "main", lambda *_: pytest.fail("it was run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "night").mkdir()
    SweepRecord([], "", {}, []).write(tmp_path / "night")
    line = command(*words.split(), status=2).refusal()
    assert re.match(r"dcpbench( \w+)?: ", line)
    assert message in line
    assert not re.search("trust=|hydra.cc", line)


@pytest.fixture
def sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter a folder of sweeps: `s` has four cells, one of which failed in one of two runs."""
    cells = [cell("ddp"), cell("ddp", "async"), cell("fsdp", "async", 0), cell("fsdp2")]
    failed = cell("fsdp", "async", 1, status="fail", reason="rank 1", model_equal=False)
    folder_with(tmp_path / "s", *cells, failed)
    folder_of_lines(tmp_path / "without rows", [])
    (tmp_path / "empty").mkdir()
    (tmp_path / "unreadable/results.jsonl").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("sweeps")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("report s --rows paralel", "--rows: no column 'paralel'; did you mean parallel?"),
        ("report s --metric status", "--metric: status is not a metric; choose one of max_abs_diff"),
        ("report s --cells --rows save", "--cells: prints one line per cell"),
        ("report s -o report.pdf", "cannot infer the format; pass --format, or end the name in"),
        ("report s -o nowhere/report.md", "cannot be written: No such file or directory"),
        ("compare s s --fail-on slow", "slow is not a kind of change; choose one of newly-failing"),
        ("compare s s --metric status", "status is not a metric; choose one of save_s"),
        ("history empty", "no sweep here or in the folders below it"),
        ("report empty", "no sweep here or in the folders below it"),
        (f"report {'x' * 300}", "cannot be read: File name too long"),
        ("report s/results.jsonl", "a file, not the folder of a sweep: try s"),
        ("report unreadable", "Is a directory"),
        ("show 'without rows'", "without rows: no rows yet"),
        ("history 'without rows'", "no rows"),
        ("history s --where status=skip", "--where: none of 5 rows in"),
        ("show s", "3 parallel=fsdp save=async, 4 parallel=fsdp2 save=sync; name one, or give its number"),
        ("show s ddp", "ddp: 2 cells: 1 parallel=ddp save=sync, 2 parallel=ddp save=async; add a word, or "
                       "give its number"),
        ("show s parallel=dpd", "parallel=dpd: no cell has parallel=dpd; did you mean parallel=ddp?"),
        ("show s fsdp2 async", "fsdp2 async: no cell has all of these words"),
        ("show s 7", "7: no such cell; their numbers are 1 to 4"),
        ("report s --where statuss!=pass", "no column 'statuss'; did you mean status?"),
        ("report s --where nothing", "expected a column, one of = != < <= > >= ~ and a value"),
        ("report s --where 'save_s>fast'", "save_s is a number or null, not 'fast'"),
        ("report s --where compile=yes", "compile is true, false or null"),
        ("report s --where 'compile>true'", "has no order"),
        ("report s --where 'save_s>null'", "has no order"),
        ("report s --where save_s~1", "save_s is not a text"),
        ("report s --where 'reason~('", "invalid regular expression: missing )"),
        ("report s --where __class__=1", "no column '__class__'"),
        ("report s --where status=psas", "status=psas: no row has that status; did you mean pass?"),
        ("report s --where status!=psas", "did you mean pass?"),
        ("report s --where parallel=hsdp", "did you mean fsdp? Choose one of ddp, fsdp"),
        ("history s --where parallel=none", "no row has that parallel; choose one of ddp, fsdp"),
        ("report s --where 'reason=nothing of the kind'", "no row has that reason; choose one of rank 1"),
    ],
)  # fmt: skip
def test_words_about_sweeps_get_one_line(words: str, message: str, command: Command) -> None:
    assert message in command(*shlex.split(words), status=2).refusal()


@pytest.mark.parametrize("keys", ["{0:colwise,3:rowwise}", "{'0':colwise,\"3\": rowwise}"])
def test_numbers_are_names_of_modules(keys: str) -> None:
    (override,) = parse_words([f"+parallel.tp_plan={keys}"])
    assert override.value() == {0: "colwise", 3: "rowwise"}
    assert ParallelConfig("tp", tp_plan=override.value()).tp_plan == {"0": "colwise", "3": "rowwise"}
