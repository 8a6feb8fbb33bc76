"""Choose stops that tell something, from when the reference made its steps and its saves."""

from dcpbench.plugins.script.record import Run


def chosen(reference: Run) -> list[str]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    last, saves = reference.length, reference.saved_steps or [0]
    # A later save shows what the script saves after the resume.
    before = [step for step in saves if step < min(last, saves[-1])] or [
        step for step in saves if step < last
    ]
    save = before[-1] if before else 0
    after = next((step for step in saves if step > save), last)
    step = min(save + (min(after, last) - save + 1) // 2 + 1, last)
    stops = [f"kill@{step}", f"term@{step}"] + [f"rank1@{step}"] * (len(reference.ranks) > 1)
    if changes := _changes_of(reference, saves[-1]):
        _, path, number = changes[-1]
        stops.append(f"write@{path}:{number}")
    changes = _changes_of(reference, save or saves[-1])
    if changes and len({*reference.disk.written.values()} & {*saves}) > 1:  # an older one is kept
        _, path, number = max(changes, key=lambda change: reference.files.get(change[1], 0))
        stops.append(f"torn@{path}:{number}")
    return stops


def _changes_of(reference: Run, save: int) -> list[tuple[float, str, int]]:
    """Return the changes that gave the files of a save their names: time, path, and the number of the change,
    counted as the recorder counts: in its process, by a part of the path."""
    changes = []
    for rank in reference.ranks:
        pairs: list[tuple[str, str]] = []
        for event in reference.of_kind("open", "rename", "remove", rank=rank):
            target = event.get("to") or event["path"]
            pairs.append((event["path"], target))
            if event["k"] == save and target in reference.disk.saves.get(save, ()):
                number = sum(target in path or target in to for path, to in pairs)
                changes.append((event["t"], target, number))
    return sorted(changes)
