"""How often compare calls a cost slower that is not, and how often it finds one that is.

python bench/rates.py --times 400

Times are drawn, not measured: sweeps of twelve cells with five repeats each. Every run has noise of its own,
and every sweep as a whole an offset of its own, so that two of them drift apart; both are log-normal.
"""

# ruff: noqa: T201

import argparse
import itertools
from functools import partial
from multiprocessing import Pool

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_identity import with_cells
from dcpbench.analysis.costs import CHANGED, Rule, costs
from dcpbench.analysis.frame import dtypes

NOISE = (0.01, 0.03, 0.05, 0.1)
DRIFT = (0.0, 0.01, 0.02, 0.03, 0.05)
"""The standard deviation of the offset of one sweep to another."""
PLANTED = 1.1
CELLS = list(itertools.product(("ddp", "fsdp", "fsdp2", "fsdp2_tp"), ("sync", "async", "async_cached")))
REPEATS = 5
BEFORE = (1, 7)
TABLES = (
    ("anything called, of comparisons of equal sweeps", 1.0),
    ("all cells called slower, of comparisons with one that takes a tenth longer", PLANTED),
)
RULE = Rule(metrics=("save_s",))


def main() -> None:
    """Print both tables: a line for each drift between two sweeps, a column for each noise of a run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--times", type=int, default=300)
    times = arguments.parse_args().times
    for (title, ratio), before in itertools.product(TABLES, BEFORE):
        print(f"{title}; sweeps before: {before}")
        print("drift noise", *(f"{noise:>7.0%}" for noise in NOISE))
        for drift in DRIFT:
            rates = (called(noise, drift, ratio, before, times) for noise in NOISE)
            print(f"{drift:>11.0%}", *(f"{rate:>7.1%}" for rate in rates), flush=True)
        print()


def called(noise: float, drift: float, ratio: float, before: int, times: int) -> float:
    """The share of comparisons that call what they are asked for."""
    with Pool() as pool:
        return (
            sum(pool.map(partial(_is_called, noise, drift, ratio, before), range(times), chunksize=10))
            / times
        )


def _is_called(noise: float, drift: float, ratio: float, before: int, seed: int) -> bool:
    random = np.random.default_rng(seed)
    sweeps = [sweep(random, number, noise, drift) for number in range(before + 1)]
    sweeps[-1]["save_s"] *= ratio
    rows = with_cells(pd.concat(sweeps, ignore_index=True), [])
    newest = rows["sweep"] == before
    lines = costs(rows[~newest], rows[newest], RULE)
    if ratio != 1:
        lines = lines[lines["level"] == "all"]
    return bool(lines["verdict"].isin(CHANGED).any())


def sweep(random: np.random.Generator, number: int, noise: float, drift: float) -> pd.DataFrame:
    """The rows of one sweep."""
    cells = [(parallel, save, repeat) for repeat in range(REPEATS) for parallel, save in CELLS]
    frame = pd.DataFrame(cells, columns=["parallel", "save", "repeat"]).reindex(columns=["sweep", *dtypes()])
    offset = random.normal(0, drift / np.sqrt(2))
    frame["save_s"] = np.exp(offset + random.normal(0, noise, len(frame)))
    frame["sweep"], frame["status"] = number, "pass"
    return frame


if __name__ == "__main__":
    main()
