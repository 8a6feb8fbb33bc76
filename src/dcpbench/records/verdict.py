"""From what each rank saw to one verdict. Plain data and no torch: ranks send it, the driver reads it."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dcpbench.records.store import CHECKS

_KEPT = 10
"""How many mismatches a report carries for each check; the number of all of them is kept beside."""


@dataclass
class CheckReport:
    """What one rank saw of one check, over all checkpoints of the cell.

    `first` is the sentence about its first mismatch. `worst` has what is known of the worst ones, the
    worst first. `control` says for each name whether the negative control was reported as different.
    """

    first: str | None = None
    worst: list[dict[str, Any]] = field(default_factory=list)
    count: int = 0
    names: list[str] = field(default_factory=list)
    max_abs_diff: float = 0.0
    control: dict[str, bool] = field(default_factory=dict)

    def add(self, name: str, sentence: str, max_abs_diff: float | None = None, **known: Any) -> None:
        """One more piece of state that is not what it should be, and what else is known of it."""
        self.count += 1
        self.first = self.first or sentence
        self.max_abs_diff = max(self.max_abs_diff, max_abs_diff or 0.0)
        if name not in self.names:
            self.names.append(name)
        one = {"name": name, "max_abs_diff": max_abs_diff, **known}
        self.worst = sorted([*self.worst, one], key=_badness, reverse=True)[:_KEPT]


@dataclass
class RankReport:
    """What one rank hands to the driver at the end of a cell; times in seconds, sizes in bytes.

    `phases` adds up to the cell, `parts` to what of them is told apart.
    `losses` has those of the uninterrupted run and of the twin from step 1 on, `resumed` those of the
    steps after each checkpoint, by the checkpoint's step. `skip` says why there is nothing to report.
    """

    rank: int
    checks: dict[str, CheckReport] = field(default_factory=dict)
    compiled: bool | None = None
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    save_s: list[float] = field(default_factory=list)
    save_stall_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    raw_write_s: list[float] = field(default_factory=list)
    raw_read_s: list[float] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    resumed: dict[int, list[float]] = field(default_factory=dict)
    checkpoint_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_host_bytes: int | None = None
    skip: str | None = None


@dataclass(frozen=True)
class Verdict:
    """`status` is pass, fail or vacuous; the driver may make an xfail or xpass of it.

    `failed` has for each check that did not hold the names of the state that differs.
    """

    status: str
    reason: str | None
    checks: dict[str, bool | None]
    failed: dict[str, list[str]]
    powered: bool
    max_abs_diff: float | None
    first_mismatch: str | None
    details: dict[str, Any]


def judge(reports: Iterable[RankReport]) -> Verdict:
    """A check holds if it held on every rank; it has power if each name was reported by some rank.

    Some rank, not every: a shard of zeros may equal its perturbed counterpart's, and an empty shard
    has nothing to differ in.
    """
    ranks = sorted(reports, key=lambda report: report.rank)
    checks: dict[str, bool | None] = {}
    failed: dict[str, list[str]] = {}
    details: dict[str, Any] = {}
    reasons: list[str] = []
    first: str | None = None
    distances: list[float] = []
    powerless: list[str] = []
    for check in CHECKS:
        seen = {report.rank: report.checks[check] for report in ranks if check in report.checks}
        if not seen:
            checks[check] = None
            continue
        checks[check] = not any(view.count for view in seen.values())
        distances.append(max(view.max_abs_diff for view in seen.values()))
        missed = _missed(view.control for view in seen.values())
        details[check] = {
            "held": checks[check],
            "control": _fired(view.control for view in seen.values()),
            "control_missed": missed,
            "worst": _worst(seen),
            "mismatch_count": sum(view.count for view in seen.values()),
        }
        if missed is None or missed:
            powerless.append(f"{check}: {_first_of(missed) if missed else 'no control ran'}")
        if not checks[check]:
            failed[check] = list(dict.fromkeys(name for view in seen.values() for name in view.names))
            reasons.append(_sentence(check, seen, failed[check]))
            first = first or _first(seen)
    not_compiled = [report.rank for report in ranks if report.compiled is False]
    if not_compiled:
        powerless.append(f"compile: nothing was compiled on rank {not_compiled[0]}")
    if not any(held is not None for held in checks.values()):
        powerless.append("no check applied")
    status = "fail" if reasons else "vacuous" if powerless else "pass"
    return Verdict(
        status=status,
        reason="; ".join(reasons) or "; ".join(powerless) or None,
        checks=checks,
        failed=failed,
        powered=not powerless,
        max_abs_diff=max(distances, default=None),
        first_mismatch=first,
        details={"checks": details, "ranks": [_without_checks(report) for report in ranks]},
    )


def _missed(controls: Iterable[dict[str, bool]]) -> list[str] | None:
    """The names that no rank's control reported; None where no control ran at all."""
    fired = _fired(controls)
    return sorted(name for name, reported in fired.items() if not reported) if fired else None


def _fired(controls: Iterable[dict[str, bool]]) -> dict[str, bool]:
    """Of each name whether some rank's control reported it."""
    fired: dict[str, bool] = {}
    for control in controls:
        for name, reported in control.items():
            fired[name] = fired.get(name, False) or reported
    return fired


def _first_of(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"its control did not report {names[0]}{more}"


def _sentence(check: str, seen: dict[int, CheckReport], names: list[str]) -> str:
    more = f", and {len(names) - _KEPT} more" if len(names) > _KEPT else ""
    others = f" (differing: {', '.join(names[:_KEPT])}{more})" if len(names) > 1 else ""
    return f"{check}: {_first(seen)}{others}"


def _first(seen: dict[int, CheckReport]) -> str:
    return next(f"rank {rank}: {view.first}" for rank, view in seen.items() if view.first)


def _badness(mismatch: dict[str, Any]) -> float:
    """What cannot be measured (a missing key, another dtype, not a number) is worse than any distance."""
    distance = mismatch["max_abs_diff"]
    return math.inf if distance is None or math.isnan(distance) else float(distance)


def _worst(seen: dict[int, CheckReport]) -> list[dict[str, Any]]:
    """The worst mismatches of all ranks: of each piece of state at each checkpoint what the rank has to
    tell on which it is worst, and on which ranks it differs."""
    together: dict[tuple[str, str], dict[str, Any]] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for rank, view in seen.items():
        for one in view.worst:
            key = one["name"], one.get("where", "")
            ranks.setdefault(key, set()).add(rank)
            if key not in together or _badness(one) > _badness(together[key]):
                together[key] = {**one, "rank": rank}
    listed = [{**one, "ranks": sorted(ranks[key])} for key, one in together.items()]
    return sorted(listed, key=_badness, reverse=True)[:_KEPT]


def _without_checks(report: RankReport) -> dict[str, Any]:
    """What of a rank's report is not told by the checks, all ranks together."""
    return {name: value for name, value in asdict(report).items() if name != "checks"}
