"""The possible orders of the operations of several ranks.

The operations of a rank, including those of its threads, keep their order. Between ranks only collectives
determine an order: a rank that receives continues after all ranks that send.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from dcpbench.plugins.crash.operations import Kind, Record, Step

_Choose = Callable[[Sequence[int]], int]


def orders(record: Record, samples: int, seed: int) -> Iterator[list[tuple[int, Step]]]:
    """Yield orders of all steps, with their ranks, that the collectives allow: for each rank the orders in
    which it is as early and as late as possible, then `samples` random ones. A single rank has one order."""
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
    return next((ready_rank for ready_rank in ready if ready_rank != rank), rank)


def _order(record: Record, choose: _Choose) -> list[tuple[int, Step]]:
    """Return one order; `choose` picks the rank, among those not waiting, that makes its next step."""
    made = [0] * len(record.ranks)
    # A rank that died has not sent all that others wait for; those have not continued either.
    known = {
        token for steps in record.ranks for step in steps if step.kind is Kind.signal for token in step.tokens
    }
    sent: set[str] = set()
    order: list[tuple[int, Step]] = []

    def is_ready(rank: int) -> bool:
        steps = record.ranks[rank]
        if made[rank] == len(steps):
            return False
        step = steps[made[rank]]
        return step.kind is not Kind.wait or sent.issuperset(known.intersection(step.tokens))

    while ready := [rank for rank in range(len(made)) if is_ready(rank)]:
        rank = choose(ready)
        step = record.ranks[rank][made[rank]]
        made[rank] += 1
        if step.kind is Kind.signal:
            sent.update(step.tokens)
        order.append((rank, step))
    return order
