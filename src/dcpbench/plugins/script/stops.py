"""Choose stops that tell something, from when the reference made its steps and its saves."""

from dcpbench.plugins.script.record import Event, Recording, is_in
from dcpbench.plugins.script.run import Stop


def chosen(reference: Recording) -> list[Stop]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    disk, last = reference.disk, reference.length
    saves = sorted(step for step in disk.sessions if step > 0)
    # A later save shows what the script saves after the resume.
    before = [step for step in saves if step < min(last, saves[-1])] or [
        step for step in saves if step < last
    ]
    save = before[-1] if before else 0
    after = next((step for step in saves if step > save), last)
    step = min(save + (min(after, last) - save + 1) // 2 + 1, last)
    stops = [Stop("kill", step), Stop("term", step)]
    if len(reference.ranks) > 1:
        stops.append(Stop("rank", step, rank=1))
    if saves and (changes := _changes_of(reference, saves[-1])):
        stops.append(_at("write", reference, changes[-1]))
    save = save or max(saves, default=0)
    changes = [change for change in _changes_of(reference, save) if _target(change) in disk.sessions[save]]
    keeps_several = len({*disk.written.values()} & disk.sessions.keys()) > 1
    if changes and keeps_several:
        largest = max(map(_target, changes), key=lambda path: reference.files.get(path, 0))
        stops.append(_at("torn", reference, [change for change in changes if _target(change) == largest][-1]))
    return stops


def _changes_of(reference: Recording, save: int) -> list[Event]:
    """Return the changes that a process made for a save, of the rank that made most."""
    paths = reference.disk.sessions.get(save, set())
    of_ranks = [
        [
            event
            for event in process.of_kind("open", "rename")
            if event["k"] == save
            and any(is_in(path, place) for path in paths for place in (event["path"], _target(event)))
        ]
        for process in reference.ranks.values()
    ]
    return max(of_ranks, key=len)


def _at(kind: str, reference: Recording, event: Event) -> Stop:
    """Return the stop at a change, counted as the recorder counts: in its process, by a part of the path."""
    part = _target(event)
    process = next(process for process in reference.ranks.values() if event in process.events)
    changes = process.of_kind("open", "rename", "remove")
    until = changes[: changes.index(event) + 1]
    number = sum(part in change["path"] or part in change.get("to", "") for change in until)
    return Stop(kind, number, part=part)


def _target(event: Event) -> str:
    return str(event.get("to") or event["path"])
