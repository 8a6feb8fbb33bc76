"""The files that a report leaves in a sweep's folder: `report.html` and `junit.xml`."""

from pathlib import Path
from xml.etree import ElementTree

import pandas as pd

from dcpbench.report.frame import again, counts, failures, read_environment, read_frame, tables
from dcpbench.results import PASSING

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


def write_reports(folder: Path) -> None:
    """Make `report.html` and `junit.xml` again from the rows of a sweep.

    Raises:
        dcpbench.results.ResultsError: the folder holds no results.
    """
    frame, _ = read_frame(folder)
    _replace(folder / "report.html", _html(folder, frame))
    _replace(folder / "junit.xml", _junit(folder, frame))


def _html(folder: Path, frame: pd.DataFrame) -> str:
    not_passed = failures(frame)
    return _PAGE.format(
        title=_escape(folder.name),
        counts=_escape(f"{len(frame)} cells: {counts(frame)}"),
        results="".join(map(_table, tables(frame))),
        failures=f'<h2>Not a plain pass</h2><div class="wide">{_table(not_passed)}</div>'
        if len(not_passed)
        else "",
        environment=_table(_environment(folder)),
    )


def _environment(folder: Path) -> pd.DataFrame:
    items = list(read_environment(folder).items()) or [("environment", "not recorded")]
    return pd.DataFrame(items, columns=["what", "seen"])


def _junit(folder: Path, frame: pd.DataFrame) -> str:
    """One testcase a cell; a known failure counts as skipped, as JUnit has no word for it, and one that
    passed only at its second try as a failure."""
    status = frame["status"].where(frame["flaky"].ne(True) | ~frame["status"].isin(PASSING), "flaky")
    suite = ElementTree.Element(
        "testsuite",
        name=f"dcpbench.{folder.name}",
        tests=str(len(frame)),
        failures=str(int(status.isin(["fail", "vacuous", "xpass", "flaky"]).sum())),
        errors=str(int(status.isin(["error", "crash", "timeout"]).sum())),
        skipped=str(int(status.isin(["skip", "xfail"]).sum())),
        time=f"{frame['cell_s'].astype(float).sum():.3f}",
    )
    spent = frame["cell_s"].astype(float).fillna(0.0)
    for item, came_to, seconds in zip(frame.itertuples(index=False), status, spent, strict=True):
        case = ElementTree.SubElement(
            suite, "testcase", classname="dcpbench", name=str(item.cell), time=f"{seconds:.3f}"
        )
        if came_to == "pass":
            continue
        kind = {"skip": "skipped", "xfail": "skipped", "error": "error", "crash": "error"}
        tag = kind.get(came_to, "error" if came_to == "timeout" else "failure")
        said = _xml_text(f"{item.status}: {item.reason}")
        found = ElementTree.SubElement(case, tag, message=said)
        if tag != "skipped":
            found.set("type", came_to)
            found.text = _xml_text(f"{item.reason}\nagain: {again(str(item.overrides), item.config_dir)}")
    ElementTree.indent(suite)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(suite, "unicode") + "\n"


def _xml_text(text: str) -> str:
    """XML 1.0 has no place for control characters, which an exception's message may hold."""
    return "".join(char if char >= " " or char in "\n\t" else "?" for char in text)


def _table(frame: pd.DataFrame) -> str:
    return frame.to_html(index=False, border=0, escape=True)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _replace(path: Path, content: str) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(content, encoding="utf-8")
    beside.replace(path)
