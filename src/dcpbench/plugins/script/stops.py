"""Choose stops that tell something, from when the reference made its steps and its saves."""

from collections.abc import Iterator

from dcpbench.plugins.script.record import Event, Recording
from dcpbench.plugins.script.run import Stop

_CHANGES = ("open", "rename", "remove")


def chosen(reference: Recording) -> list[Stop]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    last = reference.length
    saves = sorted(step for step in reference.disk.sessions if step > 0)
    before = [step for step in saves if step < last]
    # A later save shows what the script saves after the resume.
    followed = [step for step in before if step < saves[-1]] or before
    save = followed[-1] if followed else 0
    after = next((step for step in saves if step > save), last)
    step = min(save + (min(after, last) - save + 1) // 2 + 1, last)
    stops = [Stop("kill", step), Stop("term", step)]
    if len(reference.ranks) > 1:
        stops.append(Stop("rank", step, rank=1))
    if saves:
        stops += [*_in_save(reference, saves[-1]), *_after_save(reference, save or saves[-1])]
    return stops


def _in_save(reference: Recording, save: int) -> Iterator[Stop]:
    """Yield a stop at the last change of a save."""
    if changes := _changes_of(reference, save):
        path = _target(changes[-1])
        yield Stop("write", _count(reference, changes[-1], path), part=path)


def _after_save(reference: Recording, save: int) -> Iterator[Stop]:
    """Yield a stop that cuts the largest file of a save, if another checkpoint exists then."""
    paths = reference.disk.sessions[save]
    changes = [change for change in _changes_of(reference, save) if _target(change) in paths]
    if reference.disk.kept.get(save, {save}) == {save} or not changes:
        return
    largest = max((_target(change) for change in changes), key=lambda path: reference.files.get(path, 0))
    last = [change for change in changes if _target(change) == largest][-1]
    yield Stop("torn", _count(reference, last, largest), part=largest)


def _changes_of(reference: Recording, save: int) -> list[Event]:
    """Return the changes that a process made for a save, of the process that made most."""
    paths, of_each = reference.disk.sessions.get(save, set()), []
    for process in reference.processes:
        if process.steps:
            events = [event for event in process.of_kind(*_CHANGES) if event["e"] != "remove"]
            of_each.append([event for event in events if event["k"] == save and _is_of(event, paths)])
    return max(of_each, key=len, default=[])


def _is_of(event: Event, paths: set[str]) -> bool:
    targets = {_target(event), str(event["path"])}
    return any(path == target or path.startswith(f"{target}/") for path in paths for target in targets)


def _target(event: Event) -> str:
    return str(event.get("to") or event["path"])


def _count(reference: Recording, last: Event, part: str) -> int:
    """Return which change of a file with this in its path an event is, in its process."""
    for process in reference.processes:
        events = process.of_kind(*_CHANGES)
        if any(event is last for event in events):
            until = next(place for place, event in enumerate(events) if event is last)
            return sum(matches(part, event) for event in events[: until + 1])
    return 1


def matches(part: str, event: Event) -> bool:
    """Tell whether the recorder counts a change."""
    return part in str(event["path"]) or part in str(event.get("to", ""))
