"""Disk states that are possible after a crash, and impossible ones, by guarantees of the file system."""

from collections.abc import Iterable

from dcpbench.plugins.crash.disk_states import Crash, after, disk_states
from dcpbench.plugins.crash.operations import Kind, Record, Step, Tree

MADE = Step(Kind.open, path="a", file="1", truncates=True)
WRITTEN = Step(Kind.write, path="a", file="1", data=b"x" * 1024)
SYNCED = Step(Kind.fsync, path="a")
RENAMED = Step(Kind.rename, path="a", to="b")
FOLDER_SYNCED = Step(Kind.fsync, path=".")
SUCCESS = Step(Kind.success)
FULL, HALF = b"x" * 1024, b"x" * 512


def left(crash: Crash, *steps: Step, before: Tree | None = None, ended: bool = True) -> list[Tree]:
    """Return the distinct trees that a crash leaves after all of these steps, or at any time."""
    record = Record(before or {}, ((*steps, SUCCESS),))
    found = (one for one in disk_states(record, 8, 0) if one.crash is crash)
    states = [one for one in found if one.after_success or not ended]
    return [dict(items) for items in {tuple(sorted(one.tree.items())) for one in states}]


def contents(trees: Iterable[Tree], path: str) -> set[bytes | None]:
    return {tree.get(path) for tree in trees}


def test_killed_process_keeps_all_its_operations() -> None:
    assert left(Crash.killed, MADE, WRITTEN, RENAMED) == [{"b": FULL}]
    trees = left(Crash.killed, MADE, WRITTEN, RENAMED, ended=False)
    assert sorted(map(str, trees)) == sorted(map(str, [{}, {"a": b""}, {"a": FULL}, {"b": FULL}]))


def test_synced_file_with_synced_name_is_durable() -> None:
    for crash in Crash:
        assert left(crash, MADE, WRITTEN, SYNCED, FOLDER_SYNCED) == [{"a": FULL}]


def test_unsynced_bytes_are_lost_or_torn() -> None:
    journal = contents(left(Crash.journal, MADE, WRITTEN, FOLDER_SYNCED), "a")
    posix = contents(left(Crash.posix, MADE, WRITTEN, FOLDER_SYNCED), "a")
    assert journal == {FULL, HALF, b""}
    assert {FULL, HALF, b"", bytes(1024)} <= posix
    assert None not in posix


def test_file_sync_covers_its_name_only_in_a_journal() -> None:
    assert contents(left(Crash.posix, MADE, WRITTEN, SYNCED), "a") == {FULL, None}
    assert contents(left(Crash.journal, MADE, WRITTEN, SYNCED), "a") == {FULL}


def test_rename_is_atomic_only_in_a_journal() -> None:
    before: Tree = {"b": b"old"}
    steps = (MADE, WRITTEN, SYNCED, FOLDER_SYNCED, RENAMED)
    assert left(Crash.journal, *steps, before=before) in (
        [{"a": FULL, "b": b"old"}, {"b": FULL}],
        [{"b": FULL}, {"a": FULL, "b": b"old"}],
    )
    posix = [sorted(tree) for tree in left(Crash.posix, *steps, before=before)]
    assert sorted(posix) == [["a", "b"], ["a", "b"], ["b"], ["b"]]


def test_emptied_file_can_have_its_old_content() -> None:
    before: Tree = {"a": b"o" * 2048}
    for crash in (Crash.journal, Crash.posix):
        found = contents(left(crash, MADE, WRITTEN, before=before), "a")
        assert {b"o" * 2048, b"", FULL} <= found
    # A mixture of old and new bytes is possible only with POSIX guarantees.
    assert FULL + b"o" * 1024 in contents(left(Crash.posix, MADE, WRITTEN, before=before), "a")
    assert FULL + b"o" * 1024 not in contents(left(Crash.journal, MADE, WRITTEN, before=before), "a")


def test_names_in_a_lost_folder_are_lost() -> None:
    made = Step(Kind.mkdir, path="f"), Step(Kind.open, path="f/a", file="1"), Step(Kind.fsync, path="f")
    assert sorted(map(str, left(Crash.posix, *made))) == sorted(map(str, [{}, {"f": None, "f/a": b""}]))


def test_ranks_run_in_any_order_up_to_a_barrier() -> None:
    def rank(number: int) -> tuple[Step, ...]:
        return (
            Step(Kind.open, path=f"{number}", file=f"{number}"),
            Step(Kind.signal, tokens=(f"{number}",)),
            Step(Kind.wait, tokens=("0", "1")),
            Step(Kind.open, path=f"{number} after", file=f"{number} after"),
        )

    record = Record({}, (rank(0), rank(1)))
    killed = {tuple(one.tree) for one in disk_states(record, 8, 0) if one.crash is Crash.killed}
    both = ("0", "1")
    ends = {("0", "0 after", "1"), ("0", "1", "1 after"), ("0", "0 after", "1", "1 after")}
    assert killed == {(), ("0",), ("1",), both, *ends}
    assert tuple(after(record)) == ("0", "0 after", "1", "1 after")
