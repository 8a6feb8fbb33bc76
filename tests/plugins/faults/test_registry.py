"""Faults are declared once, at their functions, and are values of the group `fault`."""

import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conftest import dcpbench
from dcpbench.cli import keys_help
from dcpbench.config.groups import Expect, rank_of
from dcpbench.core.checks import CHECKS
from dcpbench.plugins.faults import registry
from dcpbench.plugins.faults.expected import NothingToInjectError
from support.alone import run_alone
from support.commands import python
from support.pretended_engine import PRETENDED

ROOT = Path(__file__).parents[3]
CONF = Path(registry.__file__).parent / "conf"


def test_fault_declares_target_and_expectations() -> None:
    faults = registry.load_faults()
    assert {"weight_lowest_bit", "file_bit"} <= faults.keys()
    for name, spec in faults.items():
        assert spec.name == name
        assert callable(pkgutil.resolve_name(str(spec.target)))
        assert spec.expects
        for expect in spec.expects:
            assert expect.check in CHECKS or expect.phases


def test_experiment_has_every_fault() -> None:
    experiment = yaml.safe_load((CONF / "experiment/faults.yaml").read_text())
    blocks = experiment["hydra"]["sweeper"]["matrix"].values()
    names = [name.strip() for block in blocks for name in block["fault"].split(",")]
    assert {*names} == registry.load_faults().keys()


def test_rank_of_a_fault_exists_in_any_world() -> None:
    ranks = {spec.rank for spec in registry.load_faults().values() if spec.rank is not None}
    assert {rank_of(rank, 2) for rank in ranks} == {0, 1}
    assert [rank_of(rank, 4) for rank in (0, 1, -2, 3)] == [0, 1, 2, 3]
    assert [rank_of(rank, 1) for rank in (0, 1, -2, 3)] == [0, 0, 0, 0]


def test_duplicate_name_raises() -> None:
    def another() -> None: ...

    with pytest.raises(ValueError, match="fault weight_nan: declared twice"):
        registry.fault(Expect("model_equal"), name="weight_nan")(another)


def test_loading_faults_does_not_import_torch() -> None:
    program = "import sys, dcpbench.plugins.faults.registry as r; r.load_faults(); print(*sys.modules)"
    ended = python("-c", program, check=True)
    imported = ended.stdout.split()
    assert "dcpbench.plugins.faults.tensors" in imported
    assert "torch" not in imported


@pytest.mark.slow
def test_glob_selects_faults(tmp_path: Path) -> None:
    asked = ("plan", "fault=glob(lr_n*)", "parallel=ddp", PRETENDED)
    ended = dcpbench(*asked, folder=tmp_path / "sweep")
    cells = [line.split()[0] for line in ended.out.splitlines() if line.startswith("lr_n")]
    assert cells == ["lr_next_float", "lr_not_restored"]


def test_unknown_fault_prints_one_line(refused: Callable[..., str]) -> None:
    assert "did you mean lr_next_float?" in refused("fault=lr_next_flaot")
    assert "matches nothing" in refused("fault=glob(weight_on_rank_9*)")


def test_shell_completes_faults() -> None:
    assert "lr_next_float" in keys_help.groups()["fault"].values


DETECTED = [
    ("nested", "keys_exchanged"),
    ("bf16", "weight_lowest_bit"),
    ("bf16", "exp_avg_zeroed"),
    ("tied", "requires_grad_lost"),
    ("dtypes", "weight_lowest_bit"),
    ("batch_norm", "weight_nan"),
    ("extra_state", "weight_lowest_bit"),
]
ALSO = [
    ("nested", "weight_lowest_bit"),
    ("tied", "weight_lowest_bit"),
    ("few_rows", "weight_lowest_bit"),
    ("frozen", "weight_lowest_bit"),
]


@pytest.mark.cell
@pytest.mark.parametrize(("model", "fault"), [*DETECTED, *ALSO])
def test_fault_is_detected_in_any_model(model: str, fault: str) -> None:
    ended = run_alone(fault, model=model, saves=1, train_steps=1, resume_steps=1).verdict
    assert ended.fault_seen, ended.reason


def test_fault_without_effect_is_not_injected() -> None:
    with pytest.raises(NothingToInjectError):
        run_alone("keys_exchanged", model="tied", saves=1, train_steps=1, resume_steps=1)
