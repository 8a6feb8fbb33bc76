"""The files that a report leaves in a sweep's folder: `report.html` and `junit.xml`."""

from pathlib import Path

from dcpbench.analysis.frame import Sweeps, read_sweeps
from dcpbench.report.junit import junit
from dcpbench.report.page import page


def write_reports(folder: Path, sweeps: Sweeps | None = None) -> None:
    """Make `report.html` and `junit.xml` again from the rows of a sweep, which are `sweeps` if these were
    read already.

    Raises:
        dcpbench.records.store.ResultsError: the folder holds no results.
        OSError: one of them cannot be written, and is what it was.
    """
    sweeps = sweeps or read_sweeps([folder])
    write_whole(folder / "report.html", page(sweeps, folder.resolve().name))
    write_whole(folder / "junit.xml", junit(sweeps))


def write_whole(path: Path, content: str) -> None:
    """Write a file that is there whole or not at all; what is no file (a pipe) is simply written to.

    Raises:
        OSError: it cannot be written, and is what it was.
    """
    if path.exists() and not path.is_file():
        path.write_text(content, encoding="utf-8")
        return
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.write_text(content, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
