"""Completion in a real, interactive bash, whose words break at `=`."""

import os
import pty
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcpbench.config.schema import conf_folder

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="no bash here")

_PROMPT = "ready> "


class Bash:
    """An interactive bash on a terminal of its own that has read what `dcpbench --completion bash` prints."""

    def __init__(self, folder: Path) -> None:
        (folder / "bin").mkdir()
        command = folder / "bin" / "dcpbench"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dcpbench "$@"\n')
        command.chmod(0o755)
        for name in ("old", "new"):
            (folder / "sweeps" / name).mkdir(parents=True)
        (folder / "my_conf/model").mkdir(parents=True)
        (folder / "my_conf/model/mine.yaml").touch()
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            os.chdir(folder)
            path = f"{folder / 'bin'}:{os.environ['PATH']}"
            given = {**os.environ, "PATH": path, "PS1": _PROMPT, "INPUTRC": "/dev/null", "TERM": "dumb"}
            os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], given)
        settings = ("bell-style none", "show-all-if-ambiguous on", "completion-query-items 0")
        quiet = "; ".join(f"bind 'set {setting}'" for setting in settings)
        self._read(_PROMPT)
        self._send(f"stty columns 200; {quiet}; eval \"$(dcpbench --completion bash)\"; echo do''ne\n")
        self._read(f"done\r\n{_PROMPT}")

    def typed(self, line: str) -> tuple[str, list[str]]:
        """Return the line after a TAB, and the offered words."""
        self._send(f"{line}\t")
        # What follows is not completed; bash shows the line as it is then.
        self._send("\x05|\x15echo do''ne\n")
        shown = self._read(f"done\r\n{_PROMPT}")
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        *offered, last = shown.partition("|")[0].replace(_PROMPT, "").split("\r\n")
        while "\x08" in last:
            last = re.sub(r"[^\x08]\x08", "", last, count=1)
        return last, " ".join(offered[1:]).split()

    def end(self) -> None:
        self._send("\x15exit\n")
        os.waitpid(self.pid, 0)
        os.close(self._terminal)

    def _send(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def _read(self, until: str) -> str:
        shown, deadline = "", time.monotonic() + 60
        while not shown.endswith(until):
            assert time.monotonic() < deadline, shown
            if select.select([self._terminal], [], [], 0.2)[0]:
                shown += os.read(self._terminal, 65536).decode()
        return shown


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[str, list[str]]]]:
    shell = Bash(tmp_path_factory.mktemp("home"))
    yield shell.typed
    shell.end()


COMPLETED = {
    "dcpbench comp": "dcpbench compare ",
    "dcpbench plan -m parallel=fsdp2_p": "dcpbench plan -m parallel=fsdp2_per_layer ",
    "dcpbench run 'parallel=fsdp2_p": "dcpbench run 'parallel=fsdp2_per_layer' ",
    "dcpbench run timeouts.sa": "dcpbench run timeouts.save_s=",
    "dcpbench run --config-dir my_conf model=mi": "dcpbench run --config-dir my_conf model=mine ",
    "dcpbench resume sweeps/ol": "dcpbench resume sweeps/old/",
    "dcpbench report sweeps/ne": "dcpbench report sweeps/new/",
}
"""Lines with one completion or none, and what a TAB makes of them."""
MORE = {
    "dcpbench run paral": "dcpbench run parallel=",
    "dcpbench run load_parallel=fsdp_n": "dcpbench run load_parallel=fsdp_no_mesh ",
    "dcpbench report --whe": "dcpbench report --where ",
    "dcpbench xyzzy": "dcpbench xyzzy",
}


@pytest.mark.slow
@pytest.mark.parametrize("lines", [COMPLETED, MORE])
def test_what_bash_makes_of_a_tab(
    bash: Callable[[str], tuple[str, list[str]]], lines: dict[str, str]
) -> None:
    for line, completed in lines.items():
        assert bash(line) == (completed, [])


@pytest.mark.slow
def test_bash_lists_what_a_tab_can_mean(bash: Callable[[str], tuple[str, list[str]]]) -> None:
    assert bash("dcpbench re") == ("dcpbench re", ["resume", "report"])
    fsdp = sorted(path.stem for path in (conf_folder() / "parallel").glob("fsdp*.yaml"))
    line, offered = bash("dcpbench parallel=fs")
    assert (line, sorted(offered)) == ("dcpbench parallel=fsdp", fsdp)
