"""How often a change is reported where there is none, and how often one that is there is found and placed.

python bench/changes.py --times 1000
"""

# ruff: noqa: T201

import argparse
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dcpbench.analysis.change_points import find_change_points

Floats = npt.NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Floats]
NOISE = 0.1
"""So large that the least effect that is reported hides few false alarms."""


def normal(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    return random.normal(size=(series, sweeps))


def heavy(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    return random.standard_t(2, size=(series, sweeps))


def common(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    """A slow night is slow for every cell: half of the variance is shared."""
    return (normal(random, series, sweeps) + normal(random, 1, sweeps)) / np.sqrt(2)


def missing(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    values = normal(random, series, sweeps)
    values[random.random(values.shape) < 0.2] = np.nan
    return values


def one_changed(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    """All of the series but the first are as ever; that one is not counted outside of its step."""
    values = normal(random, series, sweeps)
    values[0, sweeps // 2 :] += 8
    return values


def moody(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    """Each night is like the one before, with a correlation of 0.3."""
    return _alike(normal(random, series, sweeps), 0.3)


def some_moody(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    """A third of the series is like that."""
    values = normal(random, series, sweeps)
    values[::3] = _alike(values[::3], 0.3)
    return values


def very_moody(random: np.random.Generator, series: int, sweeps: int) -> Floats:
    """With a correlation of 0.6."""
    return _alike(normal(random, series, sweeps), 0.6)


def _alike(values: Floats, correlation: float) -> Floats:
    for night in range(1, values.shape[1]):
        rest = np.sqrt(1 - correlation**2) * values[:, night]
        values[:, night] = correlation * values[:, night - 1] + rest
    return values


def main() -> None:
    """Print both tables."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--times", type=int, default=1000)
    times = arguments.parse_args().times
    print("histories with a false alarm, of those without a change")
    for noise in (normal, heavy, missing, common, one_changed, moody, some_moody, very_moody):
        rates = (f"{false_alarms(noise, *size, times):8.2%}" for size in SIZES)
        print(f"{noise.__name__:12}", *rates)
    print(f"{'':12}", *(f"{f'{series}×{sweeps}':>8}" for series, sweeps in SIZES), "(series × sweeps)")
    print("\n10 % at 3 % noise: found, and placed within one sweep")
    for sweeps, after in ((30, 15), (30, 10), (30, 7), (30, 5), (100, 7), (365, 7), (365, 5), (365, 4)):
        found = (found_and_placed(series, sweeps, after, times // 5) for series in (3, 60, 600))
        print(f"{sweeps:4} sweeps, the newest {after:2}", *(f"{a:6.0%} {b:5.0%}" for a, b in found))
    print(f"{'':27}", "     3 series     60 series    600 series")


SIZES = ((3, 10), (3, 30), (60, 30), (600, 30), (60, 300))


def false_alarms(noise: Noise, series: int, sweeps: int, times: int) -> float:
    """The share of histories with any change in a series that has none."""
    random = np.random.default_rng(11)
    return sum(alarmed(noise, random, series, sweeps) for _ in range(times)) / times


def alarmed(noise: Noise, random: np.random.Generator, series: int, sweeps: int) -> bool:
    """Whether a change was reported that is none."""
    found = find_change_points(np.exp(NOISE * noise(random, series, sweeps)))
    if noise is one_changed:
        return len(found[0]) > 1 or any(found[1:])
    return any(found)


def found_and_placed(series: int, sweeps: int, after: int, times: int) -> tuple[float, float]:
    """The shares of histories in which one series' step is found, and is where it is or beside it."""
    random, found, placed = np.random.default_rng(12), 0, 0
    for _ in range(times):
        values = np.exp(0.03 * normal(random, series, sweeps))
        values[0, sweeps - after :] *= 1.1
        changed = find_change_points(values)[0]
        found += bool(changed)
        placed += any(abs(change.at - (sweeps - after)) <= 1 for change in changed)
    return found / times, placed / times


if __name__ == "__main__":
    main()
