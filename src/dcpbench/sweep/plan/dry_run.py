"""`plan=true`: what a sweep would do and how long it would take, without starting a rank."""

from collections import Counter
from pathlib import Path

from rich.table import Table
from rich.text import Text

from dcpbench.records.row import Row
from dcpbench.report.styles import console_for, standard_output, style_of, text_of
from dcpbench.sweep.folder.resume import Found
from dcpbench.sweep.plan import resources
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.plan.resources import Costs, Estimated, duration_text

_WOULD = {"run": "would run", "skip": "would be skipped", "done": "are done"}
_STYLES = {"done": style_of("pass"), "skip": style_of("skip")}


def print_plan(folder: Path, jobs: list[Job], gpus: int, found: Found | None) -> None:
    """Print to standard output what would become of each cell of the sweep in `folder`, and the sum."""
    done = found.done if found else {}
    to_run = list(resources.estimates([job for job in jobs if job.cell.name not in done], gpus).values())
    # This sweep, if it has begun and knows such cells, else the newest beside it that does.
    costs = Costs(done.values())
    source, times = "this sweep", costs
    if costs.left(to_run) is None and (other := resources.newest_like(folder, to_run)):
        source, times = str(other[0]), other[1]
    table = Table("cell", "would", "about", "because", box=None, pad_edge=False, header_style="bold")
    counts: Counter[str] = Counter()
    for job in jobs:
        would, about, because = _fate(job, done.get(job.cell.name), folder, costs, times)
        counts[would] += 1
        style = _STYLES.get(would, "default")
        table.add_row(text_of(job.cell.name), Text(would, style=style), about, text_of(because))
    console = console_for(table)
    sentences = found.sentences(len(jobs)) if found else []
    parts = [f"{counts[would]} {words}" for would, words in _WOULD.items() if counts[would]]
    sentences.append(f"{len(jobs)} cells: {', '.join(parts)}")
    if to_run:
        sentences.append(_estimate(to_run, source, times))
    with standard_output():
        console.print(table)
        console.print()
        for sentence in sentences:
            console.print(text_of(sentence), soft_wrap=True)


def _fate(job: Job, done: Row | None, folder: Path, costs: Costs, times: Costs) -> tuple[str, str, str]:
    if done:
        return "done", "", f"{done.status}: {done.reason}" if done.reason else done.status
    skip = job.skip or costs.why_skip(job.key, job.config.storage, job.checkpoints(folder))
    if skip:
        return "skip", "", skip
    expects = "; ".join(f"known failure {failure.id}: {failure.reason}" for failure in job.known_failures)
    seconds = times.seconds(resources.keys(job.key))
    return "run", "?" if seconds is None else duration_text(seconds), expects


def _estimate(to_run: list[Estimated], source: str, times: Costs) -> str:
    whole = times.left(to_run)
    if whole is None:
        return "no estimate of the time: no sweep beside this one has cells like these"
    missing = sum(times.seconds(cell.keys) is None for cell in to_run)
    known = f"{len(to_run) - missing} of the {len(to_run)}"
    text = f"about {duration_text(whole)}, from the times of cells like {known} in {source}"
    return text + f"; {missing} had none and are taken to need as long as the others do" if missing else text
