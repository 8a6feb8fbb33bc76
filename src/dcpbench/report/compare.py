"""`python -m dcpbench.report compare OLD NEW...`: which statuses changed, and which costs beyond noise."""

import argparse
import io
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dcpbench.analysis.comparison import FAIL_ON, Comparison, compared
from dcpbench.analysis.costs import Rule, always_compared
from dcpbench.analysis.environments import differences
from dcpbench.analysis.frame import Sweeps, read_sweeps, records, short_names
from dcpbench.analysis.query import QueryError, names_in
from dcpbench.records.metrics import METRICS
from dcpbench.records.store import ResultsError
from dcpbench.report import compare_document
from dcpbench.report.document import Content
from dcpbench.report.files import add_output, format_of, put_out
from dcpbench.report.markdown import markdown
from dcpbench.report.terminal import rendered

_FORMATS = {".txt": "table", ".md": "markdown", ".csv": "csv", ".json": "json"}

_EPILOG = f"""\
A side that is a folder of sweeps is all of their rows: more runs of the same cells. Cells are
matched by their axes, by overrides that are no axis, and by their whole configuration. The rule
by which a cost is called another one stands below the tables, and in docs/compare.md.

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
    metrics = list(dict.fromkeys([*always_compared(), *METRICS]))
    rule = Rule(
        _share(asked.false_alarms, "--false-alarms"),
        _share(asked.least_effect, "--least-effect"),
        _share(asked.drift, "--drift"),
        _known("--metric", names_in(asked.metric), metrics, "is not compared; the metrics")
        or always_compared(),
    )
    ignored = names_in(asked.ignore)
    fail_on = _known("--fail-on", names_in(asked.fail_on), FAIL_ON, "is no kind of change; the kinds")
    written_as = format_of(asked, _FORMATS)
    sides = {place: read_sweeps([place]) for place in dict.fromkeys([asked.old, *asked.new])}
    earlier = _earlier(asked.earlier, sides.values())
    names = {Path(place): name for place, name in short_names([str(place) for place in sides]).items()}
    if not any(len(side.frame) for side in sides.values()):
        raise ResultsError(f"{', '.join(map(str, sides))}: no rows yet, so there is nothing to compare")
    old = sides[asked.old].frame
    found = [
        compared(names[place], old, sides[place].frame, rule, ignored, earlier.frame) for place in asked.new
    ]
    if written_as in ("csv", "json"):
        text = _flat(found, written_as)
    else:
        damaged = [sentence for side in [*sides.values(), earlier] for sentence in side.left_out]
        differing = differences({names[place]: side for place, side in sides.items()})
        contents = [compare_document.environments(differing, damaged, found)]
        for one in found:
            contents += compare_document.contents(one, rule, asked.all)
        text = _text(contents, written_as, bool(asked.output))
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
    parser.add_argument("old", type=Path, help="folder of the sweep to compare with, or of several")
    parser.add_argument(
        "new", type=Path, nargs="+", help="what to judge; each of several is compared with OLD"
    )
    parser.add_argument(
        "--earlier",
        type=Path,
        action="append",
        default=[],
        metavar="SWEEP",
        help="a sweep before OLD (several times): its costs count with OLD's, its statuses do not; with five "
        "or more sweeps before NEW it is seen, and not assumed, how far equal ones drift apart",
    )
    parser.add_argument(
        "--all", action="store_true", help="every cell and every group of cells, also where nothing changed"
    )
    for option, metavar, text in (
        ("metric", "NAME", f"instead of {', '.join(always_compared())}"),
        (
            "ignore",
            "AXIS",
            "match cells whatever these axes or overrides are: to compare two models, two storages",
        ),
        ("fail-on", "KIND", "exit with 1 where there is such a change"),
    ):
        parser.add_argument(f"--{option}", action="append", default=[], metavar=f"{metavar},...", help=text)
    for option, default, text in (
        ("least-effect", Rule.least_effect, "0.05: less than 5 %% is no change"),
        (
            "drift",
            Rule.drift,
            "how far equal sweeps may differ as a whole (0.03); with six or more sweeps, that is seen",
        ),
        ("false-alarms", Rule.false_alarms, "chance of any false call (0.01)"),
    ):
        parser.add_argument(f"--{option}", type=float, default=default, metavar="SHARE", help=text)
    add_output(parser, _FORMATS, "table, or what the suffix of -o says")
    return parser


def _text(contents: list[Content], written_as: str, to_file: bool) -> str:
    if written_as == "markdown":
        return "\n".join(map(markdown, contents))
    out = io.StringIO() if to_file else sys.stdout
    return "\n".join(rendered(part, out) for part in contents)


def _flat(found: list[Comparison], written_as: str) -> str:
    table = pd.concat([one.flat() for one in found], ignore_index=True)
    if written_as == "csv":
        return str(table.to_csv(index=False))
    return json.dumps(records(table), indent=1, allow_nan=False) + "\n"


def _known(option: str, names: Sequence[str], known: Sequence[str], otherwise: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise QueryError(f"{option}: {name} {otherwise} are {', '.join(known)}")
    return tuple(names)


def _share(value: float, option: str) -> float:
    if 0 <= value < 1:
        return value
    raise QueryError(f"{option} {value}: must be a share, at least 0 and less than 1")
