"""The orders in which the operations of several ranks may have come about.

A rank's own are taken in the order in which it made them, its threads' too. Between ranks nothing is sure but
what a collective makes sure: who receives goes on after everybody has given.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dcpbench.plugins.crash.operations import Kind, Record, Step

_Choose = Callable[[Sequence[int]], int]


def orders(record: Record, samples: int, seed: int) -> Iterator[list[tuple[int, Step]]]:
    """Orders of all steps, with their ranks, that the collectives allow: for each rank those in which it is
    as early and as late as it can be, then `samples` that are drawn. One rank alone has one."""
    ranks = range(len(record.ranks))
    if len(ranks) == 1:
        yield [(0, step) for step in record.ranks[0]]
        return
    for rank in ranks:
        yield _order(record, partial(_first, rank))
        yield _order(record, partial(_last, rank))
    drawn = random.Random(seed)
    for _ in range(samples):
        yield _order(record, drawn.choice)


def _first(rank: int, ready: Sequence[int]) -> int:
    return rank if rank in ready else ready[0]


def _last(rank: int, ready: Sequence[int]) -> int:
    return next((one for one in ready if one != rank), rank)


def _order(record: Record, choose: _Choose) -> list[tuple[int, Step]]:
    """One order: `choose` says which of the ranks that may go on makes its next step."""
    made = [0] * len(record.ranks)
    # A rank that has died has not given what others wait for; nor have they gone on then.
    known = {
        token for steps in record.ranks for step in steps if step.kind is Kind.signal for token in step.tokens
    }
    given: set[str] = set()
    order: list[tuple[int, Step]] = []

    def is_ready(rank: int) -> bool:
        steps = record.ranks[rank]
        if made[rank] == len(steps):
            return False
        step = steps[made[rank]]
        return step.kind is not Kind.wait or given.issuperset(known.intersection(step.tokens))

    while ready := [rank for rank in range(len(made)) if is_ready(rank)]:
        rank = choose(ready)
        step = record.ranks[rank][made[rank]]
        made[rank] += 1
        if step.kind is Kind.signal:
            given.update(step.tokens)
        order.append((rank, step))
    return order
