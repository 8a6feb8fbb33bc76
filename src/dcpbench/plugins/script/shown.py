"""Show what a stop's runs did: the losses for the page, all that differs, and the text of an issue."""

import math
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcpbench import __version__
from dcpbench.config.text import counted, listed
from dcpbench.plugins.script.compare import KINDS, Difference, used_generators
from dcpbench.plugins.script.record import RecordedRun
from dcpbench.records.row import Row

PARALLEL = {"DistributedDataParallel": "ddp", "FullyShardedDataParallel": "fsdp", "FSDPModule": "fsdp2"}
"""Parallelisms by the classes of their modules."""
_MOST_NAMES = 8
_FOLDERS = re.compile(r"(?<![\w.:/~])/(?:[\w.@+-]+/)+")
_PACKAGES = re.compile(r"/[^\s\"']*/(?=(?:site|dist)-packages/)")


def losses(run: RecordedRun) -> list[float | None]:
    """Return the loss of each step of the first optimizer of a rank, the first; None where it has none."""
    steps = next(iter(run.ranks.values()), [])
    values = [
        next(iter(step["parts"].get("loss", {}).values()), "nan") for step in steps if not step["optimizer"]
    ]
    return [loss if math.isfinite(loss := float(value)) else None for value in values]


def differing(differences: Sequence[Difference]) -> list[str]:
    """Return a line for each value that differs, some of each kind; of tensors only digests are known."""
    lines = []
    for of in differences:
        title = KINDS[of.kind]["name"]
        for name in of.names[:_MOST_NAMES]:
            expected, actual = of.expected.get(name), of.actual.get(name)
            known = not any(isinstance(value, int) for value in (expected, actual))
            values = f"{actual} instead of {expected}" if known else "differs"
            values = "is missing" if actual is None else "is not expected" if expected is None else values
            lines.append(f"{title}: {name} {values}" + (f", rank {of.rank}" if of.rank else ""))
        if (more := len(of.names) - _MOST_NAMES) > 0:
            lines.append(f"{title}: and {more} more")
    return lines


def seen(run: RecordedRun) -> list[str]:
    """Return lines about a run of a few steps."""
    first = next(iter(run.ranks.values()))
    about, own = run.about, [step for step in first if not step["optimizer"]]
    began = min(event["t"] for event in run.events)
    start_s, step_s = own[0]["t"] - began, (own[-1]["t"] - own[0]["t"]) / max(1, len(own) - 1)
    weights = len(own[0]["parts"].get("weights", ()))
    seeded = f"torch has the seed {about['seed']}" if about["seed"] < 2**32 else "torch is not seeded"
    drawn = sorted(used_generators(first))
    saves = [
        f"{version.places[0].path} after step {version.date}" for version in run.disk.versions if version.date
    ]
    count = 9 if len(run.ranks) > 1 else 7
    kinds = [name for name in about["classes"] if name in PARALLEL or name == "OptimizedModule"]
    return [
        f"{counted(len(run.ranks), 'rank')} on {listed(about['devices'])}, torch {about['torch']}"
        + (f", {listed(kinds)}" if kinds else ""),
        f"{counted(len({step['optimizer'] for step in first}), 'optimizer')}, the first of {weights} weights",
        f"{seeded}; the steps draw from "
        + (f"the generator of {' and '.join(drawn)}" if drawn else "no generator"),
        f"saved in three steps: {listed(saves) or 'nothing'}",
        f"up to {count} runs would follow: each {start_s:.1f} s to its first step, then {step_s:.2g} s a step"
        "; --saves 3 ends each after three saves",
    ]


def issue(row: Row, places: dict[str, str]) -> str:
    """Return a failure as an issue in Markdown, without paths of this machine.

    Args:
        places: texts by the folders that they stand for, the longest first.
    """
    details: Mapping[str, Any] = row.details
    lines = [
        f"# The resume is not exact: {row.texts['verdict']} after {row.cell.removeprefix('stop=')}",
        str(row.reason),
        *(f"Likely cause: {cause}" for cause in details["likely"]),
        "What differs first:",
        "\n".join(f"- {line}" for line in details["differs"]) or "- no step was compared",
        "How to see it again:",
        f"    dcpbench {row.overrides}",
        f"After a repair: `{details['after_repair']}`",
        f"torch {row.torch_version}, Python {row.python_version}, {platform.system()} {platform.release()}, "
        f"{row['world_size']} rank(s) on {row['device']}, dcpbench {row.dcpbench_commit or __version__}",
        "End of the log:",
        "\n".join(f"    {line}" for line in details["log_tail"]) or "    (empty)",
        f"Please attach: the script, and of this folder `{Path(details['log']).name}` and the `*-records`.",
    ]
    return without_places("\n\n".join(lines) + "\n", places)


def without_places(text: str, places: dict[str, str]) -> str:
    """Return a text without the folders of this machine.

    >>> without_places('File "/opt/py/lib/site-packages/torch/a.py", /data/me/x.pt', {"/data": "DATA"})
    'File "site-packages/torch/a.py", DATA/me/x.pt'
    """
    for place, name in places.items():
        text = re.sub(rf"{re.escape(place)}(?![\w.-])", name, text)
    return _FOLDERS.sub(".../", _PACKAGES.sub("", text))
