"""The cells that a known defect of torch applies to, and their expected results."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import defects_at
from dcpbench.compare.whole_tensors import real_elements
from dcpbench.config.schema import conf_folder
from dcpbench.core.defects import Moment
from dcpbench.plan import known_failures
from dcpbench.plugins.defects import trained_alone
from dcpbench.runs.build_run import build_twin
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import GradientUse, use_recorder
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import TensorLeaf
from dcpbench.twin.gradients import (
    GradientBound,
    GradientPart,
    TwinGradient,
    TwinGradients,
    compare_gradient,
)
from dcpbench.workloads.workload import Batches, batches_of
from support.alone import ONCE, bare_cell, config, world

ANY = (
    *("buffers_of_some_rank", "empty_group", "integer_keys", "one_replica"),
    *("state_of_frozen", "tensor_lr_in_defaults", "touched_optimizer_state"),
)
ALWAYS = {
    "restored": {*ANY},
    "stored": {"buffers_of_some_rank", "one_replica"},
    "raised": {"state_of_no_gradient"},
}
FSDP1 = ("fsdp", "fsdp_tp", "hsdp")
APPLY: dict[tuple[str, int], dict[str, set[str]]] = {
    ("none", 2): {},
    ("fsdp", 2): {},
    ("fsdp", 1): {},  # one shard, but one replica
    ("hsdp", 4): {},  # replicas, but of shards
    ("hsdp", 2): {"twin": {"trained_alone"}},
    ("hsdp2", 2): {},  # FSDP2 averages
    ("fsdp_tp", 4): {"twin": {"unfrozen"}, "restored": {"sliced_by_shard"}},
    ("fsdp2_tp", 4): {},
}
"""The defects that apply to each step of a cell, by parallelism and number of ranks, in addition to those
that every model can have."""


def on(parallel: str, size: int, folder: Path) -> Cell:
    return bare_cell(folder, config(**ONCE, parallel=parallel, world_size=size), world(0, size))


def test_every_known_failure_is_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    path = conf_folder() / "known_failures.yaml"
    read = known_failures.read.__wrapped__(path)  # past the cache
    assert [one.id for one in read] == [one["id"] for one in yaml.safe_load(path.read_text())]
    assert "idle" not in capsys.readouterr().err


@pytest.mark.parametrize(("parallel", "size"), APPLY)
def test_defects_of_a_layout_apply_to_its_cells(parallel: str, size: int, tmp_path: Path) -> None:
    cell = on(parallel, size, tmp_path)
    for moment in get_args(Moment):
        expected = APPLY[parallel, size].get(moment, set()) | ALWAYS.get(moment, set())
        if parallel in FSDP1 and (parallel, size) != ("hsdp", 2):  # no copies, or copies of shards
            expected = expected - {"one_replica"}
        assert defects_at(cell, moment).keys() == expected, moment


@pytest.mark.parametrize(
    ("chosen", "restored"),
    [
        ({"model": "batch_norm"}, set()),
        ({"model": "bf16"}, {"rounded_state"}),
        ({"optimizer": "adamw_empty_group"}, set()),
        ({"optimizer": "adamw_empty_group", "state_dict": "full"}, {"as_list"}),
        ({"state_dict": "full"}, {"as_list"}),
        ({"scheduler": "multi_step"}, set()),
        ({"save": "sync_no_collectives"}, {"own_chunks"}),
        ({"save": "async_stager_kept"}, set()),
    ],
)
def test_defects_of_options_apply_to_their_cells(
    chosen: dict[str, str], restored: set[str], tmp_path: Path
) -> None:
    cell = bare_cell(tmp_path, config(**{**ONCE, **chosen}))
    assert defects_at(cell, "restored").keys() == restored | ALWAYS["restored"]


Expected = Callable[[str, TwinGradient, torch.Tensor], TwinGradient | None]
"""The gradient caused by a defect, given its name, the twin's gradient, and this rank's share of it."""


def by(defect: Any, cell: Cell) -> Expected:
    """Compute one gradient with a defect."""

    def expected(name: str, twin: TwinGradient, own: torch.Tensor) -> TwinGradient | None:
        assert defect.applies(cell.config)
        about = TwinGradients({name: twin}, {name: own})
        (state,) = defect.expected(cell, "twin", about)
        made: TwinGradient | None = state["gradient_close"].get(name)
        return made

    return expected


def explains(
    expected: Expected, name: str, here: torch.Tensor, twin: TwinGradient, ranks: int = 2
) -> tuple[bool, bool, bool]:
    """Return whether a gradient is wrong, whether a defect explains it, and whether it explains a slightly
    different one."""

    def wrong(gradient: torch.Tensor, twin: TwinGradient) -> bool:
        part = GradientPart(TensorLeaf(gradient, whole(gradient), None, "param"), gradient, gradient)
        return compare_gradient(name, 1, part, twin)[0] is not None

    made = expected(name, twin, real_elements(here) * ranks)
    explained = [made is not None and not wrong(one, made) for one in (here, here * 1.001)]
    return wrong(here, twin), explained[0], explained[1]


def summed_twin(*terms: torch.Tensor) -> TwinGradient:
    elements = [real_elements(one) for one in terms]
    bound = GradientBound(len(terms), torch.finfo(torch.float32).eps, noise=False)
    total, size = torch.stack(elements).sum(0), torch.stack(elements).abs().sum(0)
    return TwinGradient.of(bound, total, size)


ONE, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -5.0])


def gradients_of(run: OwnRun, data: Batches) -> Mapping[str, torch.Tensor]:
    """Take a step, and return the gradients that it has used."""
    uses = list[GradientUse]()
    run.take_step(run.next_batch(data), use_recorder(uses, run.model))
    return uses[0].gradients


def test_isolated_replicas_have_their_own_gradients(tmp_path: Path) -> None:
    cell = on("hsdp", 2, tmp_path)
    twin = build_twin(cell.config, cell.world, cell.config.seed)
    data = batches_of(cell.config, cell.world.device)
    own = gradients_of(twin, data)
    name, gradient = next(iter(own.items()))
    both = summed_twin(gradient, torch.ones_like(gradient))
    expected = by(trained_alone.defect, cell)
    assert explains(expected, name, gradient / 2, both) == (True, True, False)
    assert not explains(expected, name, (gradient + 1) / 2, both)[0]
