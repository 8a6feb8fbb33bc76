"""Choose stops that tell something, from when the reference made its steps and its saves."""

from collections.abc import Collection
from itertools import pairwise
from pathlib import PurePath

from dcpbench.plugins.script.record import Run


def chosen(reference: Run) -> list[str]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    last, saves = reference.length, reference.saved_steps or [0]
    # A later save shows what the script saves after the resume.
    before = saves[:-1] or [step for step in saves if step < last] or [0]
    # Names that are sorted as text end with step 9, also when step 10 is saved.
    longer = [step for earlier, step in pairwise(before) if len(str(step)) > len(str(earlier))]
    save = (longer or before[-1:])[0]
    after = next((step for step in saves if step > save), last)
    step = min(save + (after - save + 1) // 2 + 1, last)
    stops = [f"kill@{step}", f"term@{step}"] + [f"rank1@{step}"] * (len(reference.ranks) > 1)
    names = {name for path in reference.disk.saves.get(saves[-1], ()) for name in PurePath(path).parts}
    if change := _last_change(reference, saves[-1], names):
        stops.append(f"write@{change}")
    torn = save or saves[-1]
    largest = max(
        reference.disk.saves.get(torn, ()), key=lambda path: reference.files.get(path, 0), default=""
    )
    is_kept = len({*reference.disk.written.values()} & {*saves}) > 1  # an older one
    if is_kept and (change := _last_change(reference, torn, {PurePath(largest).name})):
        stops.append(f"torn@{change}")
    return stops


def _last_change(reference: Run, save: int, names: Collection[str]) -> str:
    """Return the last change in a save of a file or folder with one of these names: its path, and its number
    as the recorder counts it, in its process by a part of the path. Empty if there is none."""
    last = (0.0, "")
    for rank in reference.ranks:
        paths: list[tuple[str, str]] = []
        for event in reference.of_kind("open", "rename", "remove", rank=rank):
            target = event.get("to") or event["path"]
            paths.append((event["path"], target))
            if event["k"] == save and event["e"] != "remove" and PurePath(target).name in names:
                number = sum(target in path or target in to for path, to in paths)
                last = max(last, (event["t"], f"{target}:{number}"))
    return last[1]
