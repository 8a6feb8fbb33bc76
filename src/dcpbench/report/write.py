"""The files that a report leaves in a sweep's folder: `report.html` and `junit.xml`."""

from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.report.frame import Sweeps, failures, headline, read_sweeps, tables
from dcpbench.report.junit import junit

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>dcpbench: {title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 96rem; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #8884; vertical-align: top; }}
th {{ border-bottom-width: 2px; white-space: nowrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{counts}</p>
<h2>Results</h2>
<div class="wide">{results}</div>
{failures}
<h2>Environment</h2>
<div class="wide">{environment}</div>
</body>
</html>
"""


def write_reports(folder: Path, sweeps: Sweeps | None = None) -> None:
    """Make `report.html` and `junit.xml` again from the rows of a sweep, which are `sweeps` if these were
    read already.

    Raises:
        dcpbench.results.ResultsError: the folder holds no results.
        OSError: one of them cannot be written, and is what it was.
    """
    sweeps = sweeps or read_sweeps([folder])
    write_whole(folder / "report.html", page(sweeps, folder.resolve().name))
    write_whole(folder / "junit.xml", junit(sweeps))


def page(sweeps: Sweeps, title: str) -> str:
    """The report as one HTML page that needs nothing beside it."""
    frame = sweeps.frame
    not_passed = failures(frame)
    return _PAGE.format(
        title=_escape(title),
        counts=_escape(headline(frame)),
        results="".join(map(_table, tables(frame))),
        failures=f'<h2>Not a plain pass</h2><div class="wide">{_table(not_passed)}</div>'
        if len(not_passed)
        else "",
        environment="".join(_table(_environment(said)) for said in sweeps.environments.values()),
    )


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


def _environment(said: dict[str, Any]) -> pd.DataFrame:
    items = list(said.items()) or [("environment", "not recorded")]
    return pd.DataFrame(items, columns=["what", "seen"])


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, escape=True)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
