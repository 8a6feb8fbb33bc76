"""From what each rank saw to one verdict. Plain data and no torch: ranks send it, the driver reads it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dcpbench.results import CHECKS

_KEPT = 10
"""How many mismatches a report carries for each check; the number of all of them is kept beside."""


@dataclass
class CheckReport:
    """What one rank saw of one check, over all checkpoints of the cell.

    `control` says for each name whether the negative control was reported as different.
    """

    mismatches: list[str] = field(default_factory=list)
    count: int = 0
    names: list[str] = field(default_factory=list)
    max_abs_diff: float = 0.0
    control: dict[str, bool] = field(default_factory=dict)

    def add(self, name: str, sentence: str, max_abs_diff: float | None) -> None:
        """One more piece of state that is not what it should be."""
        self.count += 1
        self.max_abs_diff = max(self.max_abs_diff, max_abs_diff or 0.0)
        if name not in self.names:
            self.names.append(name)
        if len(self.mismatches) < _KEPT:
            self.mismatches.append(sentence)


@dataclass
class RankReport:
    """What one rank hands to the driver at the end of a cell; times in seconds, sizes in bytes.

    `losses` has those of the uninterrupted run and of the twin from step 1 on, `resumed` those of the
    steps after each checkpoint, by the checkpoint's step. `skip` says why there is nothing to report.
    """

    rank: int
    checks: dict[str, CheckReport] = field(default_factory=dict)
    compiled: bool | None = None
    phases: dict[str, float] = field(default_factory=dict)
    save_s: list[float] = field(default_factory=list)
    save_stall_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
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
            "control_names": len({name for view in seen.values() for name in view.control}),
            "control_missed": missed,
            "mismatches": [f"rank {rank}: {line}" for rank, view in seen.items() for line in view.mismatches][
                :_KEPT
            ],
            "mismatch_count": sum(view.count for view in seen.values()),
        }
        if missed is None or missed:
            powerless.append(f"{check}: {_first_of(missed) if missed else 'no control ran'}")
        if not checks[check]:
            failed[check] = list(dict.fromkeys(name for view in seen.values() for name in view.names))
            reasons.append(_sentence(check, seen, failed[check]))
            first = first or details[check]["mismatches"][0]
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
        details={"checks": details, "ranks": [asdict(report) for report in ranks]},
    )


def _missed(controls: Iterable[dict[str, bool]]) -> list[str] | None:
    """The names that no rank's control reported; None where no control ran at all."""
    fired: dict[str, bool] = {}
    for control in controls:
        for name, reported in control.items():
            fired[name] = fired.get(name, False) or reported
    return sorted(name for name, reported in fired.items() if not reported) if fired else None


def _first_of(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"its control did not report {names[0]}{more}"


def _sentence(check: str, seen: dict[int, CheckReport], names: list[str]) -> str:
    rank, view = next((rank, view) for rank, view in seen.items() if view.count)
    more = f", and {len(names) - _KEPT} more" if len(names) > _KEPT else ""
    others = f" (differing: {', '.join(names[:_KEPT])}{more})" if len(names) > 1 else ""
    return f"{check}: rank {rank}: {view.mismatches[0]}{others}"
