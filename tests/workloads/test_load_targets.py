"""Load targets: what cannot be made different in them, for each value of the matrix, has changed copies."""

from pathlib import Path
from typing import Any

import pytest

from dcpbench.compare.controls import compared_names
from dcpbench.compare.leaves import same_leaves
from dcpbench.config.schema import conf_folder
from dcpbench.core.state import StatePart, text_of
from dcpbench.runs.build_run import build
from dcpbench.runs.put import perturb_run
from dcpbench.workloads.workload import batches_of
from support.alone import config, world

UNCHANGED: dict[str, set[str]] = {
    "adam_and_sgd": {"param_groups.1.params"},
    "adamw_groups": {"param_groups.1.params"},
    "adamw_empty_group": {"param_groups.1.params", "param_groups.2.params"},
    "muon": {"param_groups.1.params"},
    "lambda": {"scheduler.lr_lambdas"},
    "data_loader": {
        *("data_loader.dataset_state", "data_loader.fetcher_state", "data_loader._index_sampler_state"),
        *("data_loader._IterableDataset_len_called", "data_loader._iterator_finished"),
        "data_loader._shared_seed",
    },
}
"""By value, the names of what cannot be changed in addition to the parameters of the first group."""
NOT_HERE = {"adam_capturable", "zero_redundancy", "large", "medium"}
"""Values that need a GPU or a process group, or take long."""
CELLS = [
    (group, path.stem)
    for group in ("model", "optimizer", "scheduler", "component", "load_into")
    for path in sorted(Path(conf_folder() / group).glob("*.yaml"))
    if path.stem not in NOT_HERE
]


@pytest.mark.parametrize(("group", "value"), CELLS)
def test_all_else_differs_in_the_target_itself(group: str, value: str) -> None:
    if value == "data_loader":
        pytest.importorskip("torchdata")
    chosen: dict[str, Any] = {"model": "short", group: value}
    given = config(**chosen)
    trained = build(given, world(), 0)
    for step in (0, 1, 2):
        trained.train(batches_of(given, world().device), step)
        saved = trained.restorable(trained.live_state())
        target = build(given, world(), 1)
        target.component.prepare(target.model, step)
        if given.load_into.filled:
            target.fill_optimizer()
        unchanged = perturb_run(target, 1000 + step)
        now = target.live_state()
        expected = {"param_groups.0.params"} | UNCHANGED.get(value, set())
        assert {text_of(name) for names in unchanged.values() for name in names} == expected
        for part in saved.keys() - {StatePart.flags}:
            same = same_leaves(saved[part], now[part]) - {*unchanged.get(part, ())}
            assert not {*map(text_of, same)} & compared_names(saved[part]).keys(), part
