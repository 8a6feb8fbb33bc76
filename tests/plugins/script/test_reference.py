"""References that are of no use, and the reasons."""

from pathlib import Path

import pytest

from dcpbench.plugins.script.record import RecordedRun
from dcpbench.plugins.script.reference import problem_of
from dcpbench.plugins.script.run import ScriptCommand

COMMAND = ScriptCommand(["python", "train.py", "--to={out}"], Path(), Path())


def run_of(folder: Path, kinds: str, log: str, status: int | None = 0) -> RecordedRun:
    (folder / "log").write_text(log)
    events = [{"e": kind, "k": 0, "t": 0.0, "process": "0", "error": "E1"} for kind in kinds.split()]
    return RecordedRun(events, folder / "log", status)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ("", "none of its Python processes was recorded"),
        ("process", "it did not import torch; the last line of its log: bye"),
        ("process torch", "it has no optimizer of torch.optim"),
        ("process torch optimizer", "it ended before a step of its optimizer"),
        ("process broken torch optimizer", "E1"),
    ],
)
def test_reason_without_a_step(tmp_path: Path, kinds: str, reason: str) -> None:
    problem = problem_of(run_of(tmp_path, kinds, "hi\nbye\n=====\n\n"), COMMAND, tmp_path, 600.0, 1.0)
    assert problem.startswith(f"made no optimizer step: {reason}"), problem


def test_later_failure(tmp_path: Path) -> None:
    late = run_of(tmp_path, "process torch", "\x1b[31mOSError\x1b[0m: \x1b]8;;x\x1b\\full\x1b]8;;\x1b\\\n", 1)
    problem = problem_of(late, COMMAND, tmp_path, 600.0, 121.0)
    expected = "exit status 1: OSError: full; try it without dcpbench: python train.py --to=NEW_FOLDER"
    assert problem == f"does not run: {expected}"


def test_archive_that_was_cut(tmp_path: Path) -> None:
    text = (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory. " * 3
    )
    assert run_of(tmp_path, "", text, 1).failure == "exit status 1: RuntimeError: not a zip archive: cut"


@pytest.mark.parametrize(
    ("status", "log", "reason"),
    [
        (-11, "", "rank 1: ended by SIGSEGV"),
        (-6, "[rank1]: ValueError: mine\n", "rank 1: ended by SIGABRT: ValueError: mine"),
        (7, "", "rank 1: exit status 7"),
        (1, "[rank1]: ValueError: mine\n", "ValueError: mine"),
        (1, "ModuleNotFoundError: of all\n", "ModuleNotFoundError: of all"),
    ],
)
def test_the_rank_that_failed_first_is_named(tmp_path: Path, status: int, log: str, reason: str) -> None:
    """torchrun's own error says nothing, and another rank's is what follows."""
    errors = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    table = (
        "Failures:\n[1]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 3)  (SIGTERM)\n"
        "Root Cause (first observed failure):\n[0]:\n  time      : now\n"
        f"  rank      : 1 (local_rank: 1)\n  exitcode  : {status} (pid: 4) \n"
    )
    text = f"[rank0]: RuntimeError: Connection reset by peer\n{log}{errors}{table}"
    assert run_of(tmp_path, "", text, 1).failure == f"exit status 1: {reason}"


def test_a_signal_has_its_name(tmp_path: Path) -> None:
    assert run_of(tmp_path, "", "bye", -11).failure == "ended by SIGSEGV: bye"
