"""`python -m dcpbench.report compare OLD NEW...`: which verdicts changed, and which costs beyond noise."""

import argparse
import io
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dcpbench.analysis.comparison import FAIL_ON, Comparison, compared
from dcpbench.analysis.costs import METRICS, MORE_METRICS, Rule
from dcpbench.analysis.environments import differences
from dcpbench.analysis.frame import Sweeps, read_sweeps, records, short_names
from dcpbench.analysis.query import QueryError, names_in
from dcpbench.records.store import ResultsError
from dcpbench.report import compare_document
from dcpbench.report.document import Content
from dcpbench.report.markdown import markdown
from dcpbench.report.output import add_output, format_of, put_out
from dcpbench.report.terminal import rendered

_EPILOG = f"""\
A side that is a folder of sweeps is all of their rows: more runs of the same cells. Cells are
matched by their axes, and by overrides that are no axis. The rule by which a cost is called
another one stands below the tables, and in docs/compare.md.

--fail-on takes one or several of {", ".join(FAIL_ON[:7])},
{", ".join(FAIL_ON[7:])}.
"""


def main(arguments: list[str]) -> int:
    """Compare sweeps.

    Returns:
        1 where something is found that `--fail-on` names, else 0.

    Raises:
        dcpbench.records.store.ResultsError: a side holds no results, or what was asked makes no sense.
    """
    asked = _parser().parse_args(arguments)
    rule = Rule(
        _share(asked.false_alarms, "--false-alarms"),
        _share(asked.least_effect, "--least-effect"),
        _share(asked.drift, "--drift"),
        tuple(_metric(name) for name in names_in(asked.metric)) or METRICS,
    )
    ignored = names_in(asked.ignore)
    fail_on = [_kind(name) for name in names_in(asked.fail_on)]
    written_as = asked.format or format_of(asked.output, _SUFFIXES)
    sides = {place: read_sweeps([place]) for place in dict.fromkeys([asked.old, *asked.new])}
    earlier = _earlier(asked.earlier, sides.values())
    names = {Path(place): name for place, name in short_names([str(place) for place in sides]).items()}
    if not any(len(side.frame) for side in sides.values()):
        raise ResultsError(f"{', '.join(map(str, sides))}: no rows yet, so there is nothing to compare")
    found = [
        compared(
            names[place],
            sides[asked.old].frame,
            sides[place].frame,
            rule,
            ignored,
            earlier.frame,
        )
        for place in asked.new
    ]
    if written_as in ("csv", "json"):
        text = _flat(found, written_as)
    else:
        damaged = [sentence for side in [*sides.values(), earlier] for sentence in side.left_out]
        differing = differences({names[place]: side for place, side in sides.items()})
        text = _said(_sections(found, differing, damaged, rule, asked.all), written_as, bool(asked.output))
    put_out(text, asked.output)
    met = [name for name in fail_on if any(name in one.kinds() for one in found)]
    if met:
        sys.stderr.write(f"dcpbench.report: found what --fail-on names: {', '.join(met)}\n")
    return 1 if met else 0


def _earlier(places: list[Path], sides: Iterable[Sweeps]) -> Sweeps:
    """The sweeps before the old one, without those that are compared: they may lie in the same folder."""
    if not places:
        return Sweeps(pd.DataFrame(), {}, [])
    read = read_sweeps(places)
    compared_ones = {Path(folder).resolve() for side in sides for folder in side.environments}
    others = read.frame["sweep"].map(lambda folder: Path(folder).resolve() not in compared_ones)
    return replace(read, frame=read.frame[others.astype(bool)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcpbench.report compare",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("old", type=Path, help="folder of the sweep to compare with, or of several")
    add("new", type=Path, nargs="+", help="what to judge; each of several is compared with OLD")
    add(
        "--earlier",
        type=Path,
        action="append",
        default=[],
        metavar="SWEEP",
        help="a sweep before OLD (several times): its costs count with OLD's, its verdicts do not; with five "
        "or more sweeps before NEW it is seen, and not assumed, how far equal ones drift apart",
    )
    add("--all", action="store_true", help="every cell and every group of cells, also where nothing changed")
    add("--metric", action="append", default=[], metavar="NAME,...", help=f"instead of {', '.join(METRICS)}")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="AXIS,...",
        help="match cells whatever these axes or overrides are: to compare two models, two storages",
    )
    add(
        "--least-effect",
        type=float,
        default=Rule.least_effect,
        metavar="SHARE",
        help="0.05: less than 5 %% is no change",
    )
    add(
        "--drift",
        type=float,
        default=Rule.drift,
        metavar="SHARE",
        help="how far equal sweeps may differ as a whole (0.03); with six or more sweeps, that is seen",
    )
    add(
        "--false-alarms",
        type=float,
        default=Rule.false_alarms,
        metavar="SHARE",
        help="chance of any false call (0.01)",
    )
    add(
        "--fail-on",
        action="append",
        default=[],
        metavar="KIND,...",
        help="exit with 1 where there is such a change",
    )
    add("--format", choices=list(_SUFFIXES.values()), help="table, or what the suffix of -o says")
    add_output(parser)
    return parser


_SUFFIXES = {".txt": "table", ".md": "markdown", ".csv": "csv", ".json": "json"}


def _sections(
    found: list[Comparison], differing: pd.DataFrame, damaged: list[str], rule: Rule, every: bool
) -> list[Content]:
    said = [compare_document.environments(differing, damaged)]
    for one in found:
        said += [compare_document.verdicts(one, every), *compare_document.costs(one, rule, every)]
    return said


def _said(said: list[Content], written_as: str, to_file: bool) -> str:
    if written_as == "markdown":
        return "\n".join(map(markdown, said))
    out = io.StringIO() if to_file else sys.stdout
    return "\n".join(rendered(part, out) for part in said)


def _flat(found: list[Comparison], written_as: str) -> str:
    table = pd.concat([one.flat() for one in found], ignore_index=True)
    if written_as == "csv":
        return str(table.to_csv(index=False))
    return json.dumps(records(table), indent=1, allow_nan=False) + "\n"


def _metric(name: str) -> str:
    metrics = (*METRICS, *MORE_METRICS)
    if name in metrics:
        return name
    raise QueryError(f"--metric: {name} is not compared; the metrics are {', '.join(metrics)}")


def _kind(name: str) -> str:
    if name in FAIL_ON:
        return name
    raise QueryError(f"--fail-on: {name} is no kind of change; the kinds are {', '.join(FAIL_ON)}")


def _share(value: float, option: str) -> float:
    if 0 <= value < 1:
        return value
    raise QueryError(f"{option} {value}: must be a share, at least 0 and less than 1")
