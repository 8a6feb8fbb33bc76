"""Which stops are chosen for a reference."""

import pytest

from dcpbench.plugins.script.record import RecordedRun
from dcpbench.plugins.script.stops import chosen
from plugins.script.runs import Writer, run_of


def reference(saves: tuple[int, ...], last: int, renames_folder: bool) -> RecordedRun:
    """A run that saves a file after these steps, in a folder of each that it renames, and keeps all."""
    writer = Writer()
    for step in range(1, last + 1):
        writer.step(step)
        if step in saves:
            folder = f"tmp-{step}" if renames_folder else f"step_{step}"
            writer.save(f"{folder}/state.pt")
            if renames_folder:
                writer.event("rename", path=folder, to=f"step_{step}")
    return run_of(writer)


def test_a_folder_that_is_renamed_is_a_change_of_its_save() -> None:
    stops = chosen(reference((4, 6, 8), 9, renames_folder=True))
    assert stops == ["kill@9", "term@8", "write@step_8:1"]
    stops = chosen(reference((4, 6, 8), 9, renames_folder=False))
    assert stops == ["kill@9", "term@8", "write@step_8/state.pt:1"]


def test_it_stops_where_names_sorted_as_text_are_in_another_order() -> None:
    """After the last save; `step_9` is the last of the names."""
    assert chosen(reference((3, 6, 9, 12, 15, 18), 20, renames_folder=True))[:2] == ["kill@20", "term@18"]
    assert chosen(reference((3, 6, 9), 20, renames_folder=True))[:2] == ["kill@16", "term@9"]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("runs/2026-11-29/00-10-16/step-{}.pt", "step-8.pt:1"),
        ("step-{}-1764374400123.pt", "step-8-:1"),
        ("3fa9c2d18b7e/step_{:08}/model.pt", "step_00000008/model.pt:1"),
    ],
)
def test_a_time_or_a_hash_is_no_part_of_a_stop(path: str, change: str) -> None:
    """Another run has another one."""
    writer = Writer()
    for step in range(1, 11):
        writer.step(step)
        if step % 4 == 0:
            writer.save(path.format(step))
    assert chosen(run_of(writer))[-1] == f"write@{change}"


@pytest.mark.parametrize(
    ("temporary", "path", "change"),
    [
        ("step-{}.pt.tmp", "step-{}.pt", "step-8.pt:1"),
        (".step-{}.pt.12{}", "step-{}.pt", "step-8.pt:1"),
        ("part", "step-{}.pt", "part:3"),
        ("state.new", "state.pt", "state.new:3"),
        ("20261129-101112/a.tmp", "20261129-101112/last.pt", "a.tmp:3"),
        ("tmp{}x", "step-{}.pt", None),
    ],
)
def test_a_temporary_file_is_opened_at_a_stop(temporary: str, path: str, change: str | None) -> None:
    """A resume must not take it; in another run it can have another name."""
    writer = Writer()
    for step in range(1, 11):
        writer.step(step)
        if step % 4 == 0:
            before, after = temporary.format(step, step), path.format(step)
            writer.save(before)
            writer.event("rename", path=before, to=after)
    stops = [stop.removeprefix("write@") for stop in chosen(run_of(writer)) if stop.startswith("write@")]
    assert stops[:-1] == ([change] if change else [])


def test_saves_by_the_clock_are_stopped_by_their_count() -> None:
    """The next run saves after other steps."""
    stops = chosen(reference((1, 3, 4, 7, 8, 9), 10, renames_folder=False))
    assert stops == ["kill@10", "term@10", "write@state.pt:3"]


def test_a_copy_is_a_stop_in_addition_to_the_save() -> None:
    """It can be what the resume takes, or a best one that no resume reads."""
    writer = Writer()
    for step in range(1, 11):
        writer.step(step)
        if step % 4 == 0:
            writer.save(f"step-{step}.pt")
            writer.event("copy", path=f"step-{step}.pt", to="last.pt")
            writer.event("open", path="last.pt")
    assert chosen(run_of(writer))[2:] == ["write@step-8.pt:1", "write@last.pt:2"]
