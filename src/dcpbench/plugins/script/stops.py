"""Choose stops that tell something, from when the reference made its steps and its saves."""

from collections.abc import Iterable
from itertools import pairwise

from dcpbench.plugins.script.record import Event, Run, is_in


def chosen(reference: Run) -> list[str]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    last, saves = reference.length, reference.saved_steps or [0]
    # A later save shows what the script saves after the resume.
    before = [step for step in saves if step < min(last, saves[-1])] or [
        step for step in saves if step < last
    ]
    # Names that are sorted as text end with step 9, also when step 10 is saved.
    longer = [step for earlier, step in pairwise(saves) if len(str(step)) > len(str(earlier))]
    save = ([step for step in longer if step in before] or before[-1:] or [0])[0]
    after = next((step for step in saves if step > save), last)
    step = min(save + (min(after, last) - save + 1) // 2 + 1, last)
    stops = [f"kill@{step}", f"term@{step}"] + [f"rank1@{step}"] * (len(reference.ranks) > 1)
    if changes := _changes_of(reference, saves[-1]):
        _, path, number, _ = changes[-1]
        stops.append(f"write@{path}:{number}")
    changes = _changes_of(reference, save or saves[-1])
    if changes and len({*reference.disk.written.values()} & {*saves}) > 1:  # an older one is kept
        _, path, number, _ = max(changes, key=lambda change: change[3])
        stops.append(f"torn@{path}:{number}")
    return stops


def _changes_of(reference: Run, save: int) -> list[tuple[float, str, int, int]]:
    """Return the changes of a save's files and of folders that hold them.

    Returns:
        of each its time, the path, its number as the recorder counts it (in its process, by a part of the
        path), and the length of the file in bytes, -1 for a folder.
    """
    saved, changes = reference.disk.saves.get(save, ()), []
    for rank in reference.ranks:
        pairs: list[tuple[str, str]] = []
        events = reference.of_kind("open", "rename", "remove", rank=rank)
        for place, event in enumerate(events):
            target = event.get("to") or event["path"]
            pairs.append((event["path"], target))
            name = _renamed(target, events[place + 1 :])
            if event["k"] == save and any(is_in(path, name) for path in saved):
                number = sum(target in path or target in to for path, to in pairs)
                length = reference.files.get(name, 0) if name in saved else -1
                changes.append((event["t"], target, number, length))
    return sorted(changes)


def _renamed(path: str, events: Iterable[Event]) -> str:
    """Return the name that a file has after these events, at the end of its save."""
    for event in events:
        if event["e"] == "rename" and is_in(path, event["path"]):
            path = event["to"] + path[len(event["path"]) :]
    return path
