"""The command on real scripts: what it prints, writes and leaves."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import TESTS, Command, Finished, dcpbench
from dcpbench.records.store import read_rows
from support.browser import Browser

pytestmark = pytest.mark.slow

SECRET = "k-0123456789"
BENCH = TESTS.parent / "benchmarks" / "resumebench"


def script(folder: Path, *words: str, **options: Any) -> Finished:
    """Run `dcpbench script`, with its results in `folder`."""
    return dcpbench("script", "--dir", str(folder), *words, folder=folder, cwd=folder.parent, **options)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A loop whose optimizer is not restored, killed, and torn in a save."""
    folder = tmp_path_factory.mktemp("script") / "results"
    stops = [f"--stop={stop}" for stop in ("kill@11", "write@step-4.pt:1", "kill@99")]
    command = [
        "env",
        f"MY_API_KEY={SECRET}",
        sys.executable,
        str(BENCH / "plain.py"),
        "{out}",
        "no_optimizer",
    ]
    return script(folder, *stops, "--", *command)


def test_rows_of_stops(checked: Finished) -> None:
    rows = [row.flat() for row in read_rows(checked.folder)[0]]
    assert checked.status == 1, checked.out + checked.err
    assert [(row["verdict"], row["status"], row["resume"]) for row in rows] == [
        ("diverges", "fail", False),
        ("exact", "pass", True),
        ("not_reached", "skip", None),
    ]
    first = rows[0]
    numbers = [first[name] for name in ("loaded_step", "newest_step", "first_step")]
    assert (numbers, first["first_kind"]) == ([8, 8, 9], "moments")
    assert (first["scenario"], first["model"], first["world_size"]) == ("script", "plain.py", 1)
    assert first["config"]["script.command"].endswith("plain.py '{out}' no_optimizer")
    assert first["config"]["--stop"] == "kill@11"
    assert len({row["config_digest"] for row in rows}) == 3
    assert rows[1]["reason"].startswith("exact: from the start: no checkpoint was complete")


def test_secrets_are_written_nowhere(checked: Finished) -> None:
    assert "env MY_API_KEY=*** " in read_rows(checked.folder)[0][0].overrides
    assert SECRET not in checked.out + checked.err
    written = [path for path in checked.folder.rglob("*") if path.is_file()]
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_file_of_the_user_is_not_written_over(tmp_path: Path) -> None:
    """Neither by the reference, nor without the recorder."""
    (tmp_path / "last.pt").write_text("mine")
    code = "import sys; open(sys.argv[2], 'w')"
    ended = script(tmp_path / "x", "--", sys.executable, "-c", code, "{out}", str(tmp_path / "last.pt"))
    assert ended.status == 2
    text = f"before it changes {tmp_path}/last.pt, which was there before (open): the command names it by"
    assert text in ended.err
    assert (tmp_path / "last.pt").read_text() == "mine"


def test_reports_of_stops(checked: Finished, command: Command) -> None:
    out = command(checked.folder).out
    assert "fail kill@11: diverges: step 9" in out
    assert "likely: the optimizer's state is not restored" in out
    assert "dcpbench script --stop=kill@11 -- " in out
    assert "all stops: env MY_API_KEY=*** " in out
    assert "3 stops: 1 fail, 1 pass, 1 skip" in out
    assert "0 of 3" in command("compare", checked.folder, checked.folder).out
    assert 'classname="script.none" name="stop=kill@11"' in (checked.folder / "junit.xml").read_text()


@pytest.mark.browser
def test_page_of_stops(checked: Finished, browser: Browser) -> None:
    browser.open(checked.folder / "report.html", width=390)
    assert browser.js("return document.documentElement.scrollWidth") == 390
    first, *others = browser.all("article.stop")
    for text in ("kill@11\ndiverges", "is not restored", f"--again {checked.folder.name} --stop=kill@11"):
        assert text in first.text
    assert "hyperparameters: group 0 lr 0.001 instead of 0.0046" in first.text, (
        "not the first in causal order"
    )
    assert "diverges: " not in first.text, "its reason does not repeat the verdict"
    assert browser.text("#axis-filters").split() == ["stop"]
    assert len(others) == 2
    # In the chart and below it; vertical lines have no area, and are not displayed to Selenium.
    marks = [f"return document.querySelectorAll('.m-{name}').length" for name in ("stopped", "loaded")]
    assert [*map(browser.js, marks)] == [4, 2]
    links = browser.js(
        "return [...document.querySelectorAll('article a')].map((it) => it.getAttribute('href'))"
    )
    assert len(links) == 3
    assert [link for link in links if not (checked.folder / link).is_file()] == []
    assert "3 stops, 1 not as expected" in browser.text("#verdict")
    shown = browser.text("body").replace("of each cell", "")
    assert ("cell" in shown, "Checks" in shown, browser.console()) == (False, False, [])


def test_issue_of_a_stop(checked: Finished) -> None:
    text = next(checked.folder.glob("stop-kill-11-*/issue.md")).read_text()
    assert "# The resume is not exact: diverges after kill@11" in text
    assert "- optimizer state: 0.weight.step is missing" in text
    assert "dcpbench script --stop=kill@11 -- env MY_API_KEY=*** .../python" in text
    assert "`resumed.log`" in text
    assert [word for word in (str(checked.folder), str(Path.home()), str(BENCH)) if word in text] == []


def test_copies_are_resumed_again(checked: Finished, tmp_path: Path) -> None:
    """With another command, as if the script were repaired; the row replaces the earlier one."""
    shutil.copytree(checked.folder, folder := tmp_path / "x")
    words = ["script", "--again", str(folder)]
    refused = dcpbench(*words, folder=folder)
    assert (refused.status, "secrets are not stored" in refused.err) == (2, True), refused.err
    refused = dcpbench(*words, "--stop=kill@99", "--", "true", folder=folder)
    assert "kill@99: no copy of a stop that failed; kept: kill@11" in refused.err
    ended = dcpbench(*words, "--", sys.executable, str(BENCH / "plain.py"), "{out}", folder=folder)
    assert ended.status == 0, ended.out + ended.err
    assert "uninterrupted" not in ended.out
    rows = {row.config["--stop"]: row for row in read_rows(folder)[0]}
    assert [row["verdict"] for row in rows.values()] == ["exact", "not_reached", "exact"]
    assert "; the saves are those of the earlier script" in str(rows["kill@11"].reason)
    assert not [*folder.glob("*/issue.md")], "nothing is left to report"


def test_working_folder_is_copied_and_its_edited_script_resumes_again(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(
        "import os, torch; torch.manual_seed(0)\n"
        "p = torch.nn.Linear(2, 1); o = torch.optim.SGD(p.parameters(), 0.1); step = 0\n"
        "if os.path.exists('last.pt'): state = torch.load('last.pt'); step = state['step']\n"
        "for step in range(step + 1, 7):\n"
        "    p(torch.full((1, 2), float(step))).sum().backward(); o.step(); o.zero_grad()\n"
        "    if step % 2 == 0: torch.save({'p': p.state_dict(), 'step': step}, 'last.pt')\n"
    )
    ended = script(tmp_path / "x", "--stop=kill@4", "--", sys.executable, "train.py")
    assert "is copied for each run" in ended.out
    assert not (tmp_path / "last.pt").exists()
    assert "dcpbench script --again x --stop=kill@4" in ended.out, ended.out
    path.write_text(
        path.read_text().replace("; step = state", "; p.load_state_dict(state['p']); step = state")
    )
    ended = dcpbench("script", "--again", str(tmp_path / "x"), folder=tmp_path, cwd=Path.home())
    assert (ended.status, "1 of 1 stop exact" in ended.out) == (0, True), ended.out + ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--stop=kill@x", "--", "true"], "expected kill@STEP"),
        (["--", "no-such-command", "{out}"], "cannot be started"),
        (
            ["--", sys.executable, "-c", "raise ValueError('{out}'[:0])"],
            "with or without dcpbench's recorder: exit status 1: ValueError",
        ),
        (
            [
                "--",
                sys.executable,
                "-c",
                "import os; '{out}'; 'DCPBENCH_SCRIPT' in os.environ and exit('recorded')",
            ],
            "but not with it: a fault of dcpbench: exit status 1: recorded; see",
        ),
        (
            ["--", sys.executable, "-I", "-c", "'{out}'"],
            "none of its Python processes was recorded: python -I",
        ),
        (
            ["--", "torchrun", "--nnodes=2", "train.py", "{out}"],
            "nnodes=2: dcpbench script checks commands that",
        ),
        (
            ["--timeout=3", "--", sys.executable, "-c", "import time; time.sleep(600)", "{out}"],
            "takes longer than 3 s",
        ),
        ([], "-- COMMAND: is missing"),
        (["--", "train.py", "{out}"], "No such file or directory; for a Python file, write python train.py"),
    ],
)
def test_wrong_use(tmp_path: Path, words: list[str], message: str) -> None:
    ended = script(tmp_path / "x", *words)
    assert (ended.status, message in ended.err) == (2, True), ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "words", [["pkg/train.py", "{out}"], ["-m", "pkg.train", "{out}"], ["-m", "pkg.train"]]
)
def test_modules_beside_the_script_are_imported(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "beside.py").touch()
    (tmp_path / "pkg" / "train.py").write_text(
        "if __package__: import pkg.beside\n"
        "else: import beside\n"
        "import os; print('runs', {'PYTHONSAFEPATH'} & os.environ.keys())\n"
    )
    ended = script(tmp_path / "x", "--", sys.executable, *words, own_process=True)
    assert (ended.status, "made no optimizer step" in ended.err) == (2, True), ended.err
    assert (tmp_path / "x" / "reference" / "reference.log").read_text() == "runs set()\n"


def test_large_working_folder_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        os.truncate(file.fileno(), 3 * 1024**3)
    ended = script(tmp_path / "x", "--", "true")
    assert (ended.status, "write {out}" in ended.err) == (2, True), ended.err


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A loop that resumes from the path that its words name."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "train.py").write_text(
        "import sys, torch\n"
        "out, *path = sys.argv[1:]\n"
        "assert torch.are_deterministic_algorithms_enabled()\n"
        "torch.manual_seed(0)\n"
        "p = torch.nn.Linear(2, 1); o = torch.optim.SGD(p.parameters(), 0.1, momentum=0.9); step = 0\n"
        "if path: state = torch.load(path[0]); p.load_state_dict(state['p']); step = int(path[1])\n"
        "if path: o.load_state_dict(state['o'])\n"
        "for step in range(step + 1, 14):\n"
        "    p(torch.full((1, 2), float(step))).sum().backward(); o.step(); o.zero_grad()\n"
        "    if step % 3: continue\n"
        "    torch.save({'p': p.state_dict(), 'o': o.state_dict()}, f'{out}/at-{step}.pt')\n"
    )
    stops = ["--stop=kill@2", "--stop=kill@14", "--stop=kill@11", "--stop=write@at-12.pt:1"]
    more = ["--deterministic", "--resume-args={newest:at-*.pt} {step}"]
    return script(folder / "x", *stops, *more, "--", sys.executable, "train.py", "{out}")


def test_words_of_the_resume_name_the_newest_checkpoint(named: Finished) -> None:
    rows = [row.flat() for row in read_rows(named.folder)[0]]
    assert [row["verdict"] for row in rows] == ["exact", "not_reached", "exact", "exact"], named.out
    assert [row["loaded_step"] for row in rows] == [0, None, 9, 9]
    assert "without --resume-args, as no path fits yet" in rows[0]["reason"]
    assert "dcpbench chose the checkpoint" in rows[2]["reason"]
    assert "deterministic algorithms of torch are set in all runs" in named.out
    assert "--deterministic --stop=kill@11" in rows[2]["overrides"]


def test_long_jobs_end_after_saves(tmp_path: Path) -> None:
    """A script that never ends: its runs are ended some steps after a save, or after three steps."""
    (tmp_path / "train.py").write_text(
        "import os, sys, torch, itertools\n"
        "torch.manual_seed(7); p = torch.nn.Linear(2, 1)\n"
        "o = torch.optim.SGD(p.parameters(), 0.1); step = 0\n"
        "last = f'{sys.argv[1]}/last.pt'\n"
        "if os.path.exists(last):\n"
        "    state = torch.load(last); p.load_state_dict(state['p']); step = state['step']\n"
        "for step in itertools.count(step + 1):\n"
        "    p(torch.full((1, 2), step / 64)).sum().backward(); o.step(); o.zero_grad()\n"
        "    if step % 6 == 0: torch.save({'p': p.state_dict(), 'step': step}, last)\n"
    )
    command = ["--", sys.executable, "train.py", "{out}"]
    ended = script(tmp_path / "x", "--saves=2", "--stop=kill@9", *command)
    assert (ended.status, "steps 7 to 18 are equal" in ended.out) == (0, True), ended.out + ended.err
    assert "frozen               18 steps on 1 rank, saves after step 6, 12 " in ended.out
    assert "--saves=2" in read_rows(tmp_path / "x")[0][0].overrides
    ended = script(tmp_path / "look", "--look", *command)
    assert (ended.status, "torch has the seed 7; " in ended.out) == (0, True), ended.out + ended.err
    assert "up to 7 runs would follow" in ended.out
    assert "1 optimizer, the first of 2 weights" in ended.out
