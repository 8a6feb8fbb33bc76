"""Injected faults on ranks, and the statuses that no death of a rank gives."""

from pathlib import Path
from typing import Any

import pytest

from conftest import SMALL, TESTS, Finished, blocks, run, selected
from support.pretended_engine import PRETENDED

pytestmark = pytest.mark.slow


FAULTS = {
    "weight_lowest_bit": ("model_equal", "net1.weight"),
    "file_overwritten_later": ("files_unchanged", ".distcp"),
    "save_nudges_weight": ("save_harmless", "net1.weight"),
    "stale_stage": ("model_equal", "net1.weight"),
    "second_step_wrong": ("state_resume_equal", "net1.weight"),
    "save_leaves_thread": ("side_effect_free", "process.threads"),
}
"""One of each kind; test_alone.py has more, on one rank."""
BESIDE = (
    *("model_equal", "optim_equal", "extra_equal"),
    *("checkpoint_whole", "save_harmless", "files_unchanged", "files_equal"),
)
AFTERWARDS = ("state_resume_equal", "flags_equal", "side_effect_free")


@pytest.fixture(scope="module")
def faulty(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("faulty") / "sweep"
    faults = selected(request, "fault") or [*FAULTS]
    lists = (f"fault={','.join(faults)}", "parallel=fsdp2", "saves=2", "device=cpu", "world_size=2")
    return run(folder, "-m", *SMALL, *lists)


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_fails_the_right_check(faulty: Finished, fault: str) -> None:
    row = faulty.row(fault=fault)
    check, name = FAULTS[fault]
    assert row["status"] == "fail"
    assert row["fault_seen"] is True
    assert row[check] is False
    assert f"{check}: rank " in row["reason"]
    assert name in row["reason"]
    if fault not in ("stale_stage", "save_nudges_weight"):  # which other checks see as well
        assert all(row[other] for other in BESIDE if other != check)
    if check in AFTERWARDS:
        others = (*AFTERWARDS, "loss_resume_equal", "gradient_close", "step_equal", "batch_loss_close")
        assert all(row[other] for other in others if other != check)


def test_sweep_with_detected_faults_is_ok(faulty: Finished) -> None:
    assert [row["cell"] for row in faulty.rows if not row["fault_seen"]] == []
    assert faulty.status == 0


@pytest.fixture(scope="module")
def unexpected(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Without the list a known failure fails; a list that names a cell that passes makes an xpass. A second
    step that is never taken stands for what the checks are blind to. A dead net has no gradients."""
    folder = tmp_path_factory.mktemp("unexpected") / "sweep"
    listed = folder.parent / "known.yaml"
    listed.write_text(
        "- {id: a, cells: {seed: 1, optimizer: adam}, torch: '>=2', checks: {model_equal: []}, reason: a}\n"
    )
    short = {"saves": 1, "train_steps": 1, "resume_steps": 1}
    cells: list[dict[str, Any]] = [
        {"model": "frozen", "optimizer": "adagrad", "seed": 1, **short},
        {"model": "short", "seed": 1, **short},
        {"model": "short", "fault": "second_step_wrong", **short},
        {"optimizer": "sgd", "optimizer.lr": 100},
        {"model": "short", "seed": 2, "storage.keep_free_bytes": 10**18},
    ]
    alone = ("parallel=none", "world_size=1", "device=cpu", "retry=0")
    return run(folder, *blocks(cells), f"known_failures={listed}", *alone)


def test_undetected_fault_is_reported(unexpected: Finished) -> None:
    row = unexpected.row(fault="second_step_wrong")
    assert row["fault_seen"] is False
    assert "fault=second_step_wrong was not detected" in row["reason"]
    assert unexpected.status == 1


def test_dead_net_is_vacuous(unexpected: Finished) -> None:
    """Without a gradient the losses compared say nothing, although they are all equal."""
    row = unexpected.row(optimizer="sgd")
    assert row["status"] == "vacuous", row["reason"]
    assert row["loss_resume_equal"] is True
    assert row["powered"] is False
    assert "loss_resume_equal: its control did not report loss of step" in row["reason"]


def test_unlisted_failure_and_listed_pass_are_not_ok(unexpected: Finished) -> None:
    failed = unexpected.row(model="frozen")
    assert failed["status"] == "fail"
    assert unexpected.row(model="short", seed=1)["status"] == "xpass"
    kept = unexpected.folder / failed["cell"] / "checkpoints"
    assert list(kept.rglob("*.distcp")), "the checkpoint of a failed cell is kept"


def test_disk_space_is_checked_before_each_cell(unexpected: Finished) -> None:
    ran, skipped = unexpected.row(optimizer="sgd"), unexpected.row(seed=2)
    assert ran["disk_bytes"] > 1.5 * ran["checkpoint_bytes"], "there are two checkpoints"
    assert ran["config_dir"] == str(TESTS / "conf")
    assert skipped["status"] == "skip"
    assert "too little disk space" in skipped["reason"]
    assert "888.2 PiB have to stay free" in skipped["reason"]
    assert not (unexpected.folder / skipped["cell"]).exists()


def test_sweep_of_skips_measures_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path / "sweep", "-m", "save=async_cached", "device=cpu", "parallel=ddp,fsdp", PRETENDED)
    assert [row["status"] for row in ended.rows] == ["skip", "skip"]
    assert ended.status == 1
    assert "nothing was measured" in ended.err
