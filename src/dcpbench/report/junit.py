"""The rows of a sweep as JUnit XML: one testcase for each run of a cell.

The structure follows the schema of Jenkins' xUnit plugin, which GitLab and GitHub read too. JUnit has no
known failures, so `xfail` counts as skipped.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain, count
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from dcpbench.analysis.causes import likely
from dcpbench.analysis.frame import Sweeps, records, short_names
from dcpbench.analysis.runs import again
from dcpbench.config.text import clipped
from dcpbench.core.statuses import FLAKY, MISSED, shown
from dcpbench.records.row import cell_seconds
from dcpbench.records.row_reader import dict_in, list_in

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MESSAGE = 2_000


def junit(sweep: Sweeps) -> str:
    """Return a testsuite with one testcase for each row.

    A failure has its likely cause, its reason and the command to run the cell again; `system-out` has the
    end of the log of the first rank that failed.
    """
    ((folder, environment),) = sweep.environments.items()
    suite = _suite(short_names([folder])[folder], environment, records(sweep.frame))
    root = Element("testsuites", name="dcpbench")
    for name in ("tests", "failures", "errors", "time"):
        root.set(name, suite.get(name, ""))
    root.append(suite)
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, "unicode") + "\n"


def _suite(name: str, environment: dict[str, Any], rows: list[dict[str, Any]]) -> Element:
    kinds = Counter(_outcome(row)[0] for row in rows)
    suite = Element("testsuite", name=_text(f"dcpbench.{name}"), tests=str(len(rows)))
    for counted, kind in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(counted, str(kinds[kind]))
    suite.set("time", f"{sum(cell_seconds(row) or 0.0 for row in rows):.3f}")
    if started := sorted(row["started_at"] for row in rows if row["started_at"]):
        suite.set("timestamp", _text(started[0]))
    properties = SubElement(suite, "properties")
    for key, value in environment.items():
        text = value if isinstance(value, str) else json.dumps(value)
        SubElement(properties, "property", name=_text(key), value=_text(text))
    for row, unique in zip(rows, _unique(str(row["cell"]) for row in rows), strict=True):
        suite.append(_case(row, unique))
    return suite


def _case(row: dict[str, Any], name: str) -> Element:
    case = Element("testcase", classname=_text(f"{row['scenario']}.{row['parallel']}"), name=_text(name))
    case.set("time", f"{cell_seconds(row) or 0.0:.3f}")
    kind, what = _outcome(row)
    reason = row["reason"] or ""
    if kind != "passed":
        message = _text(clipped(f"{what}: {reason}", _MESSAGE))
        found = SubElement(case, kind, type=_text(what), message=message)
        command = f"again: {again(row['overrides'], row['config_dir'], row['cwd'])}"
        found.text = _text("\n".join(filter(None, [*likely(row), reason, command])))
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
    if first := dict_in(details.get("first_try")):
        yield f"first attempt: {first.get('status')}: {first.get('reason')}"
        yield from _log(first)
    yield from _log(details)


def _log(details: dict[str, Any]) -> Iterable[str]:
    if log := list_in(details.get("log_tail")):
        yield f"end of the log of rank {details.get('rank', '?')}:"
        yield from map(str, log)


def _unique(names: Iterable[str]) -> Iterable[str]:
    """Number equal names: readers keep one testcase of a name."""
    taken: set[str] = set()
    for name in names:
        candidates = chain([name], (f"{name} ({number})" for number in count(2)))
        unique = next(candidate for candidate in candidates if candidate not in taken)
        taken.add(unique)
        yield unique


def _text(text: str) -> str:
    """Replace control characters, which XML 1.0 does not allow."""
    return _NOT_XML.sub("\ufffd", text)
