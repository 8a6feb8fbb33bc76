"""What breaks a promise is printed as a script in plain torch, which shows the same."""

import runpy
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.crash_states.disk_states import Crash, after, disk_states
from dcpbench.crash_states.loading import Judge, Loaded
from dcpbench.crash_states.script import plain_script
from dcpbench.crash_states.survey import StateKind, survey
from support.crashes import NEW, OLD, loading, names, recorded


@pytest.mark.parametrize(
    ("crash", "loaded", "shown"),
    [
        (Crash.killed, Loaded.mixture, "loaded values of the steps {'a': [2.0], 'b': [1.0], 'step': [1.0]}"),
        (Crash.killed, Loaded.refused, "refused: CheckpointException"),
    ],
)
def test_the_script_shows_what_was_found(
    crash: Crash, loaded: Loaded, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"single_file_per_rank": False}

    def writer(folder: Path) -> FileSystemWriter:
        return FileSystemWriter(folder, **options)

    with recorded(writer, same_folder=True) as (record, _), loading() as loader:
        found = survey(disk_states(record, 0, 0), loader, Judge(NEW, OLD), names(same_folder=True))
    kind = StateKind(crash, False, loaded)
    trees = record.before, after(record)
    script = plain_script(str(kind), found.simplest[kind], "checkpoint", trees, NEW, options, 1)
    (tmp_path / "script.py").write_text(script)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(tmp_path / "script.py"), run_name="__main__")
    assert ended.value.code == 1
    assert shown in capsys.readouterr().out
