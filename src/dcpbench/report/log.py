"""`python -m dcpbench.report log <sweep>... --to <tracker>`: the rows, where a team looks at its runs anyway.

Logging a sweep again adds nothing that is there: cells that have run again since replace their earlier runs.
"""

import argparse
import importlib
import sys
from pathlib import Path

from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.store import ResultsError

_TRACKERS = ("tensorboard", "mlflow", "wandb")


def main(arguments: list[str]) -> int:
    """Log sweeps to a tracker.

    Raises:
        dcpbench.records.store.ResultsError: a folder holds no results, or the tracker's package is missing.
    """
    given = _parser().parse_args(arguments)
    try:
        tracker = importlib.import_module(f"dcpbench.report.trackers.{given.to}")
    except ModuleNotFoundError as error:
        raise ResultsError(
            f"--to {given.to}: the package {error.name} is not installed: pip install 'dcpbench[{given.to}]'"
        ) from None
    from dcpbench.report.trackers import logged_sweep

    folder: Path = given.dir or Path("outputs") / given.to
    sweeps = read_sweeps(given.sweep)
    for sentence in sweeps.left_out:
        sys.stderr.write(f"dcpbench.report: {sentence}\n")
    for place, environment in sweeps.environments.items():
        sweep = logged_sweep(Path(place), environment)
        logged = tracker.log(sweep, folder, given.project)
        counts = [f"{logged.new} cells logged"]
        counts += [f"{logged.replaced} replaced, which have run again"] if logged.replaced else []
        counts += [f"{logged.same} were there already"] if logged.same else []
        print(f"{place}: {', '.join(counts)}")
    print(f"in {folder}; to see it: {tracker.seen_with(folder)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    log = argparse.ArgumentParser(
        prog="python -m dcpbench.report log",
        description="Write the rows of sweeps as runs of a tracker, on this machine; nothing is sent.",
    )
    log.add_argument("sweep", type=Path, nargs="+", help="a sweep's folder, or one that holds sweeps")
    log.add_argument("--to", choices=_TRACKERS, required=True)
    log.add_argument("--dir", type=Path, help="where to write (outputs/<tracker>)")
    log.add_argument(
        "--project",
        type=_name,
        default="dcpbench",
        help="the project (wandb), experiment (mlflow) or folder (tensorboard) of the runs (%(default)s)",
    )
    return log


def _name(text: str) -> str:
    if not text or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is no name")
    return text
