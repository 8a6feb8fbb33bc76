"""What a user types: bad input, interruption, the report, start-up."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from conftest import (
    SMALL,
    Finished,
    alive_in,
    environment,
    hanging,
    start,
    wait_for,
    words_of,
)
from dcpbench import __main__
from dcpbench.cli import commands
from support import drivers, gloo_ranks
from support.commands import python
from support.pretended_engine import PRETENDED

REFUSED = {
    "parallel=ddp,hsdp3": ("parallel=hsdp3", "did you mean hsdp"),
    "parallel=fsdp_tp parallel.tp=3 device=cpu": ("tp=3", "world size 4"),
    "known_failures=/nowhere.yaml": ("known_failures=/nowhere.yaml: there is no such file",),
    "executor.hosts=1,2": ("executor.hosts=1: applies to the complete sweep; pass one value",),
}
"""More words are refused in cli/test_words.py, cli/test_hydra_errors.py and config/."""


@pytest.mark.slow
@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_configuration_gets_one_line(words: str, refused: Callable[..., str]) -> None:
    line = refused(*words.split(), PRETENDED)
    assert line.startswith(("dcpbench: ", "dcpbench run: "))
    assert all(part in line for part in REFUSED[words]), line
    assert "object_type" not in line
    assert "full_key" not in line


@pytest.mark.slow
@pytest.mark.parametrize("key", ["hydra.sweep.dir", "storage.root"])
def test_place_that_cannot_be_written_to_is_refused(
    key: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    (blocked := tmp_path / "a-file").write_text("mine")
    of_sweep = key == "hydra.sweep.dir"
    words = ("parallel=ddp", "device=cpu", f"storage.root={'null' if of_sweep else blocked}", PRETENDED)
    assert key in refused(*words, folder=(blocked if of_sweep else tmp_path) / "sweep")
    assert blocked.read_text() == "mine"


@pytest.mark.slow
def test_start_by_torchrun_is_refused(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):  # as torchrun sets them
        monkeypatch.setenv(name, "1")
    started = "dcpbench: RANK and WORLD_SIZE are set, as by torchrun: unset them and start dcpbench once"
    assert refused("parallel=ddp", "device=cpu").startswith(started)


NEEDS_NO_TORCH = {
    "": ("Usage: dcpbench", 0),
    "--help": ("  compare  show what changed", 0),
    "run --help": ("parallel=fsdp  ", 0),
    "--version": ("torch 2", 0),
    "run --cfg job": ("parallel:", 0),
    "report compre": ("did you mean dcpbench compare?", 2),
    "parallel=ddp fsdp": ("did you mean parallel=fsdp?", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", NEEDS_NO_TORCH)
def test_help_and_configuration_need_no_torch(words: str) -> None:
    told, status = NEEDS_NO_TORCH[words]
    ended = python("-X", "importtime", "-m", "dcpbench", *words.split())
    assert ended.returncode == status
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("import time:")]
    assert told in (ended.stdout if status == 0 else lines[0])
    assert len(lines) == (status == 2)
    imported = {line.rsplit("|", 1)[-1].strip() for line in ended.stderr.splitlines()}
    assert "dcpbench.config.schema" in imported
    assert not imported & {"torch", "pandas", "numpy"}
    assert "--help" not in words or not imported & {"hydra", "omegaconf"}


HANGS = ("-m", "scenario=save_load,hangs", "parallel=ddp", "world_size=2", "device=cpu", "saves=1", *SMALL)


@pytest.mark.slow
def test_ctrl_c_among_cells_that_share_ends_all_ranks(tmp_path: Path) -> None:
    """At other moments: adversary/test_signals.py."""
    folder = tmp_path / "sweep"
    driver = start(*words_of(folder, *HANGS, "sharing=correctness"), cwd=tmp_path)
    wait_for(lambda: hanging(folder))
    os.killpg(driver.pid, signal.SIGINT)
    out, err = driver.communicate(timeout=30)
    assert driver.returncode == 130, err
    first, second, *_, following, last = err.splitlines()
    assert (first, second) == ("2 cells; rows go to sweep", "2 ranks starting")
    assert (following[:5], last) == ("next:", "interrupted: 1 of 2 cells done, 1 left")
    assert "1 cell: 1 pass, 1 left\n" in out
    assert alive_in(folder) == []


@pytest.mark.slow
def test_ignored_interrupts_stay_ignored(tmp_path: Path) -> None:
    """As those of a background job of a script."""
    words = (sys.executable, "-m", "dcpbench", *words_of(tmp_path / "sweep", "parallel=ddp", PRETENDED))
    ignored = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with psutil.Popen(words, cwd=tmp_path, env=environment(), preexec_fn=ignored) as driver:
        while driver.poll() is None:
            driver.send_signal(signal.SIGINT)
            time.sleep(0.01)
    assert driver.returncode == 0


@pytest.mark.slow
def test_sweeps_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "dcpbench", "run", "parallel=ddp", "device=cpu", PRETENDED)
    started = [psutil.Popen(words, cwd=tmp_path, env=environment()) for _ in range(4)]
    assert [driver.wait() for driver in started] == [0] * 4
    assert len([*(tmp_path / "outputs").iterdir()]) == 4


@pytest.mark.slow
def test_ranks_raise_the_limit_of_open_files(sweep: Callable[..., Finished]) -> None:
    """Else a few hundred ranks, which all have connections to each other, reach the usual limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (30, most))
    ended = sweep("parallel=ddp", "saves=1", "device=cpu", "world_size=4", *SMALL, prepare=few)
    assert [row["status"] for row in ended.rows] == ["pass"], (ended.out, ended.err)


@pytest.mark.slow
def test_report_prints_the_same_table(tmp_path: Path, sweep: Callable[..., Finished]) -> None:
    ended = sweep("-m", "parallel=ddp,none", "device=cpu", "world_size=2", PRETENDED)
    assert ended.status == 0
    again = python("-X", "importtime", "-m", "dcpbench", "report", str(ended.folder), check=True)
    assert again.stdout == ended.out
    imported = {line.rsplit("|", 1)[-1].strip() for line in again.stderr.splitlines()}
    assert "pandas" in imported
    assert not imported & {"torch", "scipy.special"}


def words_of_process(process: psutil.Process) -> str:
    """The words that started it; none if it has ended."""
    with suppress(psutil.NoSuchProcess):  # or is a zombie
        return " ".join(process.cmdline())
    return ""


def test_no_rank_is_left_running() -> None:
    kept = {agent.pid for agent in (drivers.first, drivers.restarted) if agent.runs()} | gloo_ranks.kept
    mine = [process for process in psutil.Process().children(recursive=True) if process.pid not in kept]
    agents = [process for process in mine if "rank.agent" in words_of_process(process)]
    _, left = psutil.wait_procs(agents, timeout=20)  # one whose driver died ends after its imports
    assert left == []


INTERRUPTED = """
import signal, sys
from hydra._internal.hydra import Hydra
from dcpbench.cli.run import main
from dcpbench.cli.words import check

get_mode = Hydra.get_mode

def interrupted(*arguments, **options):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        {}

Hydra.get_mode = interrupted
sys.exit(main(check(["parallel=none", "hydra.sweep.dir=s"])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cleanup",
    ["return None", "raise TypeError", "return get_mode(*arguments, **options)"],
)
def test_interrupt_that_a_library_hides_ends_the_run(cleanup: str, tmp_path: Path) -> None:
    """Hydra takes an error for "no mode", and OmegaConf's cleanup raises another one."""
    ended = python("-c", INTERRUPTED.format(cleanup), cwd=tmp_path)
    line = "dcpbench: interrupted before a cell was run; nothing was written\n"
    assert (ended.returncode, ended.stderr) == (130, line)


def test_only_the_folder_of_python_m_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PYTHONPATH names stays, also where that is the current folder."""
    seen: list[list[str]] = []
    monkeypatch.setattr(commands, "main", lambda words: seen.append([*sys.path]) or 0)
    monkeypatch.setenv("PYTHONSAFEPATH", "")  # so that what main() sets is undone
    monkeypatch.delenv("PYTHONSAFEPATH")
    monkeypatch.chdir(tmp_path)
    here = str(tmp_path)
    interrupted = signal.getsignal(signal.SIGINT)
    try:
        for path in ([here, "/installed"], [here, here, "/installed"], ["/usr/bin", here]):
            monkeypatch.setattr(sys, "path", path)
            with pytest.raises(SystemExit):
                __main__.main()
    finally:
        signal.signal(signal.SIGINT, interrupted)
    assert seen == [["/installed"], [here, "/installed"], ["/usr/bin", here]]
    assert os.environ["PYTHONSAFEPATH"] == "dcpbench"
