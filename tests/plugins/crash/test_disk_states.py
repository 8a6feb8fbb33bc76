"""Which states of a disk are there after a crash, and which are not, by what the file system promises."""

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
    """The distinct trees that a crash leaves after all of these steps, or at any time."""
    record = Record(before or {}, ((*steps, SUCCESS),))
    states = [one for one in disk_states(record, 8, 0) if one.crash is crash and (one.told or not ended)]
    return [dict(items) for items in {tuple(sorted(one.tree.items())) for one in states}]


def contents(trees: Iterable[Tree], path: str) -> set[bytes | None]:
    return {tree.get(path) for tree in trees}


def test_who_is_killed_leaves_all_that_was_done() -> None:
    assert left(Crash.killed, MADE, WRITTEN, RENAMED) == [{"b": FULL}]
    trees = left(Crash.killed, MADE, WRITTEN, RENAMED, ended=False)
    assert sorted(map(str, trees)) == sorted(map(str, [{}, {"a": b""}, {"a": FULL}, {"b": FULL}]))


def test_what_is_synced_with_its_name_stays() -> None:
    for crash in Crash:
        assert left(crash, MADE, WRITTEN, SYNCED, FOLDER_SYNCED) == [{"a": FULL}]


def test_bytes_that_are_not_synced_are_lost_or_torn() -> None:
    journal = contents(left(Crash.journal, MADE, WRITTEN, FOLDER_SYNCED), "a")
    posix = contents(left(Crash.posix, MADE, WRITTEN, FOLDER_SYNCED), "a")
    assert journal == {FULL, HALF, b""}
    assert {FULL, HALF, b"", bytes(1024)} <= posix
    assert None not in posix


def test_a_name_is_synced_with_its_folder_and_in_a_journal_with_anything() -> None:
    assert contents(left(Crash.posix, MADE, WRITTEN, SYNCED), "a") == {FULL, None}
    assert contents(left(Crash.journal, MADE, WRITTEN, SYNCED), "a") == {FULL}


def test_a_rename_is_whole_in_a_journal_alone() -> None:
    before: Tree = {"b": b"old"}
    steps = (MADE, WRITTEN, SYNCED, FOLDER_SYNCED, RENAMED)
    assert left(Crash.journal, *steps, before=before) in (
        [{"a": FULL, "b": b"old"}, {"b": FULL}],
        [{"b": FULL}, {"a": FULL, "b": b"old"}],
    )
    posix = [sorted(tree) for tree in left(Crash.posix, *steps, before=before)]
    assert sorted(posix) == [["a", "b"], ["a", "b"], ["b"], ["b"]]


def test_an_emptied_file_may_hold_what_it_held() -> None:
    before: Tree = {"a": b"o" * 2048}
    for crash in (Crash.journal, Crash.posix):
        found = contents(left(crash, MADE, WRITTEN, before=before), "a")
        assert {b"o" * 2048, b"", FULL} <= found
    # Bytes of both are there only where the standard alone holds.
    assert FULL + b"o" * 1024 in contents(left(Crash.posix, MADE, WRITTEN, before=before), "a")
    assert FULL + b"o" * 1024 not in contents(left(Crash.journal, MADE, WRITTEN, before=before), "a")


def test_names_in_a_folder_go_with_it() -> None:
    made = Step(Kind.mkdir, path="f"), Step(Kind.open, path="f/a", file="1"), Step(Kind.fsync, path="f")
    assert sorted(map(str, left(Crash.posix, *made))) == sorted(map(str, [{}, {"f": None, "f/a": b""}]))


def test_ranks_go_on_in_all_orders_but_past_a_barrier() -> None:
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
