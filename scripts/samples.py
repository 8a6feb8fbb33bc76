"""The samples of output in README.md and docs/: what their commands print now.

    python scripts/samples.py            # writes them
    python scripts/samples.py --check    # exit status 1 where one is not what its command prints

A sample is a `console` block below a comment. Each line with `$ ` is a command, with the lines that `\\`
continues; what it prints to standard output follows. `sample` is compared as it stands; in a `timed sample`
every decimal number is masked, and with it the width of columns; `at 100` is the width of a terminal, a file
if nothing is said; `ends with 1` is the exit status of the last command, else 0. All commands run in one
folder, the tutorial that makes the sweeps first, and a sample that stands on two pages runs once. The folder
holds bench/, docs/ and the files that pages show below `<!-- file: path -->`.

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
_SIZE = {"COLUMNS": "", "LINES": ""}  # which would be believed more than the terminal
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[-+]\d+)?(?![\w.])")
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class StaleError(Exception):
    """A sample whose command ended otherwise than it says."""


def pages(root: Path = ROOT) -> list[Path]:
    """The Markdown files that may have samples, in the order in which these are run."""
    found = sorted((root / "docs").rglob("*.md"), key=lambda path: (path.stem != _FIRST, path))
    return [*found, root / "README.md", root / "CONTRIBUTING.md"]


class Samples:
    """Runs the samples of pages, one page after the other, in a folder of its own."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        for name in ("bench", "docs"):
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("*.png", "*.md"))
        self._ran: dict[tuple[tuple[str, ...], int], tuple[str, int]] = {}

    def made(self, text: str) -> str:
        """A page's text with its samples as they are now; StaleError where a command ends otherwise."""
        return MARKED.sub(self._block, text)

    def differing(self, text: str) -> Iterator[tuple[str, str]]:
        """Each sample that is not what its commands print, and what they print."""
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
        """Commands with what each prints, in a terminal of so many columns, with 0 into a file, and how the
        last one ends."""
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": beside, "XDG_STATE_HOME": str(self.folder / "state")}
        shown, status = "", 0
        for command in commands:
            text, errors, status = _printed(command, self.folder, {**os.environ, **own, **_SIZE}, columns)
            if status not in (0, 1):
                raise StaleError(f"{command}: ended with {status}\n{errors}")
            lines = text.replace(str(self.folder), "/home/you").splitlines()
            shown += f"$ {command}\n" + "".join(f"{line.rstrip()}\n" for line in lines)
        return shown, status


def _printed(command: str, folder: Path, environment: dict[str, str], columns: int) -> tuple[str, str, int]:
    """What a command prints to standard output and to standard error, and its exit status."""
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
        except OSError:  # nobody has the terminal open any more
            pass
        os.close(ours)
        status = process.wait()
        errors.seek(0)
        return _COLOURS.sub("", text.decode()).replace("\r\n", "\n"), errors.read(), status


def _masked(text: str) -> str:
    """Decimal numbers are all alike, and so are the widths of columns."""
    return re.sub(r"[ ─━-]{2,}", " ", _NUMBER.sub("#", text))


def main() -> int:
    """Write or check all samples; the exit status."""
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
    for page, text in made.items():  # at the end: sweeps note whether the checkout is as it was committed
        page.write_text(text)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
