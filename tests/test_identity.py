"""A cell whose configuration was edited is another cell, and the report says what differs."""

import pytest

from conftest import Finished, dcpbench
from support.commands import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Finished]:
    """The same command twice; between them the YAML of its model is edited."""
    place = tmp_path_factory.mktemp("identity")
    model = place / "conf" / "model" / "tiny.yaml"
    model.parent.mkdir(parents=True)
    ended = []
    for name, sizes in (("old", "[3, 4, 2]"), ("new", "[3, 64, 2]")):
        model.write_text(f"name: tiny\ntarget: dcpbench.workloads.models.Mlp\noptions: {{sizes: {sizes}}}\n")
        folder = place / name
        words = ("-m", "model=tiny,dummy", "parallel=none", "world_size=1", "saves=1", "device=cpu")
        own = ("--config-dir", str(place / "conf"))
        ended.append(dcpbench(*own, *words, f"hydra.sweep.dir={folder}", folder=folder, cwd=place))
    return ended[0], ended[1]


def test_compare_tells_the_edit_and_calls_nothing_slower(
    sweeps: tuple[Finished, Finished], capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = sweeps
    assert [row["status"] for ended in sweeps for row in ended.rows] == ["pass"] * 4
    fail_on = "slower,larger,smaller,newly-failing,vanished,new"
    status = main(["compare", str(old.folder), str(new.folder), "--fail-on", fail_on])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "model.options.sizes" in printed
    assert "[3, 4, 2]" in printed
    assert "[3, 64, 2]" in printed
    status = main(["compare", str(old.folder), str(new.folder), "--fail-on", "other-configuration"])
    assert status == 1


def test_history_tells_it_too(sweeps: tuple[Finished, Finished], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", str(sweeps[0].folder.parent)]) == 0
    assert "model.options.sizes" in capsys.readouterr().out
