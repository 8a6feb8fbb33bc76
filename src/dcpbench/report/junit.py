"""The rows of a sweep as JUnit XML: one testcase for each run of a cell.

The structure follows the schema of Jenkins' xUnit plugin, which GitLab and GitHub read too. JUnit has no
known failures, so `xfail` counts as skipped.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from dcpbench.analysis.causes import causes_of
from dcpbench.analysis.frame import Sweeps, plain_rows, short_names
from dcpbench.analysis.runs import rerun_command
from dcpbench.config.text import clipped
from dcpbench.core.statuses import FLAKY, MISSED, shown
from dcpbench.records.row import cell_seconds, dict_in, list_in

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MESSAGE = 2_000


def junit(sweep: Sweeps) -> str:
    """Return a testsuite with one testcase for each row.

    A failure has its likely cause, its reason and the command to run the cell again; `system-out` has the
    end of the log of the first rank that failed.
    """
    ((folder, environment),) = sweep.environments.items()
    rows = plain_rows(sweep.frame)
    kinds = Counter(_outcome(row)[0] for row in rows)
    counts = {"tests": len(rows), "failures": kinds["failure"], "errors": kinds["error"]}
    of_both = {name: str(count) for name, count in counts.items()}
    of_both["time"] = f"{sum(cell_seconds(row) or 0.0 for row in rows):.3f}"
    root = Element("testsuites", {"name": "dcpbench", **of_both})
    name = _text(f"dcpbench.{short_names([folder])[folder]}")
    suite = SubElement(root, "testsuite", {"name": name, **of_both, "skipped": str(kinds["skipped"])})
    if started := sorted(row["started_at"] for row in rows if row["started_at"]):
        suite.set("timestamp", _text(started[0]))
    properties = SubElement(suite, "properties")
    for key, value in environment.items():
        text = value if isinstance(value, str) else json.dumps(value)
        SubElement(properties, "property", name=_text(key), value=_text(text))
    suite.extend(map(_case, rows))
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, "unicode") + "\n"


def _case(row: dict[str, Any]) -> Element:
    name = {"classname": f"{row['scenario']}.{row['parallel']}", "name": str(row["cell"])}
    case = Element("testcase", {key: _text(value) for key, value in name.items()})
    case.set("time", f"{cell_seconds(row) or 0.0:.3f}")
    kind, what = _outcome(row)
    reason = row["reason"] or ""
    if kind != "passed":
        message = _text(clipped(f"{what}: {reason}", _MESSAGE))
        element = SubElement(case, kind, type=_text(what), message=message)
        command = f"again: {rerun_command(row)}"
        element.text = _text(
            "\n".join(filter(None, [*(f"likely: {cause}" for cause in causes_of(row)), reason, command]))
        )
    if output := "\n".join(_output(row)):
        SubElement(case, "system-out").text = _text(output)
    return case


def _outcome(row: dict[str, Any]) -> tuple[str, str]:
    """Return the kind of a row's result in JUnit, and its status."""
    status = str(row["status"])
    spec = shown(status, row["flaky"], row["fault_seen"])
    what = {MISSED: "fault not detected", FLAKY: f"flaky {status}"}.get(spec, status)
    return spec.junit, what


def _output(row: dict[str, Any]) -> Iterable[str]:
    details = dict_in(row["details"])
    if row["fault_seen"]:
        yield f"injected fault {row['fault']} was detected: {row['reason']}"
    if log := list_in(details.get("log_tail")):
        yield f"end of the log of rank {details.get('rank', '?')}:"
        yield from map(str, log)


def _text(text: str) -> str:
    """Replace control characters, which XML 1.0 does not allow."""
    return _NOT_XML.sub("\ufffd", text)
