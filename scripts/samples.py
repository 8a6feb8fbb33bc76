"""Run the samples of output in README.md and docs/, and write or check what their commands print.

    python scripts/samples.py            # writes them
    python scripts/samples.py --check    # exits with 1 if a sample differs

A sample is a `console` block below a comment. A line with `$ ` is a command, `\\` continues it, and its
standard output follows. A `sample` is compared exactly; a `timed sample` with decimal numbers and the widths
of columns masked. `at 100` is the width of a terminal; without it, output goes to a file. `ends with 1` is
the exit status of the last command, else 0. All commands run in one folder, those of the first tutorial
first; a sample on two pages runs once. The folder contains bench/, docs/ and the files that pages show below
`<!-- file: path -->`.

    <!-- timed sample at 100, ends with 1 -->
"""

import argparse
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FIRST = "resume-exact"
_FENCED = r"\n```(?P<kind>\w+)\n(?P<text>.*?)```"
MARKED = re.compile(
    r"<!-- (?:file: (?P<file>\S+)|(?P<timed>timed )?sample(?: at (?P<columns>\d+))?"
    r"(?:, ends with (?P<status>\d+))?) -->" + _FENCED,
    re.DOTALL,
)
_SIZE = {"COLUMNS": "", "LINES": ""}  # they would override the size of the terminal
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[-+]\d+)?(?![\w.])")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class StaleError(Exception):
    """The command of a sample ended with another status."""


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown files that can have samples, in the order in which they run."""
    found = sorted((root / "docs").rglob("*.md"), key=lambda path: (path.stem != _FIRST, path))
    return [*found, root / "README.md", root / "CONTRIBUTING.md"]


class Samples:
    """Runs the samples of pages in one folder."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        for name in ("bench", "docs"):
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("*.png", "*.md"))
        self._ran: dict[tuple[tuple[str, ...], int], tuple[str, int]] = {}

    def made(self, text: str) -> str:
        """Return a page's text with new samples; StaleError if a command ends with another status."""
        return MARKED.sub(self._block, text)

    def differing(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each sample that differs from what its commands print, and what they print."""
        for found in MARKED.finditer(text):
            now = self._block(found)
            masked = _masked if found["timed"] else str
            if masked(now) != masked(found[0]):
                yield found[0], now

    def _block(self, found: re.Match[str]) -> str:
        if found["file"]:
            file = self.folder / found["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(found["text"])
            return found[0]
        commands = (*_COMMAND.findall(found["text"]),)
        asked = commands, int(found["columns"] or 0)
        if asked not in self._ran:
            self._ran[asked] = self._run(*asked)
        shown, status = self._ran[asked]
        if status != int(found["status"] or 0):
            raise StaleError(f"{commands[-1]}: ended with {status}\n{shown}")
        return found[0][: found.start("text") - found.start()] + shown + "```"

    def _run(self, commands: tuple[str, ...], columns: int) -> tuple[str, int]:
        """Return commands with their output, in a terminal of this width or with 0 into a file, and the exit
        status of the last one."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "XDG_STATE_HOME": str(self.folder / "state")}
        shown, status = "", 0
        for command in commands:
            text, errors, status = _printed(command, self.folder, {**os.environ, **own, **_SIZE}, columns)
            if status not in (0, 1):
                raise StaleError(f"{command}: ended with {status}\n{errors}")
            lines = text.replace(str(self.folder), "/home/you").splitlines()
            shown += f"$ {command}\n" + "".join(f"{line.rstrip()}\n" for line in lines)
        return shown, status


def _printed(command: str, folder: Path, environment: dict[str, str], columns: int) -> tuple[str, str, int]:
    """Return a command's standard output, standard error and exit status."""
    ours, theirs = pty.openpty() if columns else os.pipe()
    if columns:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=folder, env=environment, stdout=theirs, stderr=errors
        )
        os.close(theirs)
        text = b""
        try:
            while part := os.read(ours, 65536):
                text += part
        except OSError:  # the other end of the terminal is closed
            pass
        os.close(ours)
        status = process.wait()
        errors.seek(0)
        return _COLOURS.sub("", text.decode()).replace("\r\n", "\n"), errors.read(), status


def _masked(text: str) -> str:
    """Replace decimal numbers and the widths of columns."""
    return re.sub(r"[ ─━-]{2,}", " ", _NUMBER.sub("#", text))


def main() -> int:
    """Write or check all samples; return the exit status."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--check", action="store_true", help="compare, and write nothing")
    asked = ask.parse_args()
    made, stale = {}, 0
    with tempfile.TemporaryDirectory(prefix="dcpbench-samples-") as folder:
        samples = Samples(Path(folder))
        for page in pages():
            text = page.read_text()
            if not asked.check:
                made[page] = samples.made(text)
                continue
            for shown, now in samples.differing(text):
                stale += 1
                print(f"{page.relative_to(ROOT)} shows\n{shown}\nand it prints\n{now}\n")
    for page, text in made.items():  # at the end: sweeps record whether the checkout is modified
        page.write_text(text)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
