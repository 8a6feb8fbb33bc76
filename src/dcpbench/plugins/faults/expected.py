"""Judges whether an injected fault was detected as it has to be."""

import re
from dataclasses import replace

from dcpbench.config.groups import Expect, rank_of
from dcpbench.config.schema import Config
from dcpbench.verdict.verdict import Verdict


class NothingToInjectError(Exception):
    """The cell's fault cannot be injected: there is no target for it, or it would change nothing."""


def judge_fault(config: Config, verdict: Verdict) -> Verdict:
    """Return the verdict with `fault_seen`: whether a check, or a load that raised, detected the fault. If it
    cannot be injected into the cell, return a skip."""
    fault, error = config.fault, verdict.error
    if not fault.target or verdict.status == "skip":
        return verdict
    if error and error.type == NothingToInjectError.__name__ and not verdict.failed:
        return Verdict("skip", f"fault={fault.name}: {error.message}")
    expects = [
        expect if expect.rank is None else replace(expect, rank=rank_of(expect.rank, config.most_ranks))
        for expect in fault.expects
    ]
    failing = verdict.status in ("fail", "error")
    if failing and any(_is_met(expect, verdict) for expect in expects):
        return replace(verdict, fault_seen=True)
    wanted = " or ".join(map(_expectation, expects))
    reason = f"fault={fault.name} was not detected as {wanted}: {verdict.reason or 'nothing failed'}"
    return replace(verdict, fault_seen=False, reason=reason)


def _is_met(expect: Expect, verdict: Verdict) -> bool:
    error = verdict.error
    if expect.phases:
        return (
            error is not None
            and error.phase in expect.phases
            and expect.error in (None, error.type)
            and re.search(expect.message or "", error.message) is not None
        )
    return any(
        expect.check in (None, failed.check)
        and expect.rank in (None, failed.rank)
        and expect.problem in (None, failed.first.problem)
        and re.fullmatch(expect.name or ".*", failed.first.name)
        for failed in verdict.failed
    )


def _expectation(expect: Expect) -> str:
    """Return an expectation as text: `optim_equal on rank 2 of param_groups.0.lr`."""
    if expect.phases:
        text = f"{expect.error or 'an error'} in {' or '.join(expect.phases)}"
        return f"{text} ({expect.message})" if expect.message else text
    parts = (
        expect.check or "a check",
        f"on rank {expect.rank}" if expect.rank is not None else "",
        f"of {expect.name}" if expect.name else "",
        f"({expect.problem})" if expect.problem else "",
    )
    return " ".join(filter(None, parts))
