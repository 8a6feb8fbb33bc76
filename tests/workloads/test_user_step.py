"""The `step` of a workload: its fields, the uses of gradients in it, and models that are called in parts."""

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

import workloads.stand_in_transformers
from dcpbench.config.groups import WorkloadConfig
from dcpbench.core.rank_report import Skip
from dcpbench.runs.run import GradientUse, noting_uses, use_suffixes
from dcpbench.state.snapshot import named_as_saved, snapshot_model
from dcpbench.workloads.parallelisms import ddp
from dcpbench.workloads.workload import workload_of
from support.alone import config, group_of_one, run_alone
from support.ordinary_workloads import net, reversed_loss
from support.user_steps import pair

HERE = "support.user_steps."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": reversed_loss}, "loss, step: pass one of the two"),
        ({"step": None}, "loss, step: pass one of the two"),
        ({"step": 3}, "step is a int; pass a function (see Workload)"),
        ({"accumulate": 2}, "step: accumulate does not apply; do it in step"),
        ({"clip_grad_norm": 1.0}, "step: clip_grad_norm does not apply; do it in step"),
    ],
)
def test_fields_that_do_not_go_with_step_are_refused(fields: dict[str, Any], message: str) -> None:
    given = config()
    given.workload = WorkloadConfig(f"{HERE}wrong_field", options=fields)
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{HERE}wrong_field: {message}")):
        workload_of(given)


def test_step_without_a_loss_is_refused() -> None:
    message = f"workload.target={HERE}wrong_field: step returned a NoneType; return a scalar tensor"
    with pytest.raises(TypeError, match=re.escape(message)):
        run_alone(workload={"target": f"{HERE}wrong_field"})


def test_components_that_change_the_backward_pass_are_skipped() -> None:
    verdict = run_alone(workload={"target": f"{HERE}gan"}, component="grad_scaler").verdict
    line = (
        f"workload.target={HERE}gan: step: component=grad_scaler changes the backward pass; do that in step"
    )
    assert (verdict.status, verdict.reason) == ("skip", line)


def test_closures_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with noting_uses([optimizer], [], lambda *_: None), pytest.raises(Skip, match="has a closure"):
        optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("name", ["my_gan", "my_gpt", "my_average"])
def test_workloads_of_the_documentation_train_and_resume(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    (code,) = re.findall(rf"<!-- file: {name}.py -->\n```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", workloads.stand_in_transformers)
    verdict = run_alone(workload={"target": f"{name}.build"}, saves=1).verdict
    del sys.modules[name]  # other tests have a module of this name in another folder
    assert (verdict.status, verdict.training) == ("pass", True), verdict.reason


def test_gradients_are_used_by_optimizers_and_by_clipping_of_any_part_of_them() -> None:
    model = net()
    first, last = (torch.optim.SGD(one.parameters(), 0.1) for one in (model[0], model[2]))
    uses: list[tuple[str, int]] = []
    model(torch.ones(2, 8)).sum().backward()
    clip = nn.utils.clip_grad_value_  # imported before
    with noting_uses(
        [first, last], [*model.parameters()], lambda by, several: uses.append((by, len(several)))
    ):
        clip(model[0].parameters(), 1.0)
        first.step()
        last.step()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    first.step()
    assert uses == [("clipping", 2), ("optimizer 0", 2), ("optimizer 1", 2)]


def test_uses_have_numbers_where_there_are_several() -> None:
    assert use_suffixes([GradientUse("the optimizer", {})]) == [""]
    assert use_suffixes([GradientUse(by, {}) for by in ("a", "b", "a")]) == [
        " before a, use 1",
        " before b",
        " before a, use 2",
    ]


def _wrapped(model: nn.Module) -> nn.Module:
    class Mesh:
        def get_group(self) -> dist.ProcessGroup:
            return dist.new_group([0])  # not the default one

    mesh: Any = Mesh()
    return ddp(model, mesh, config(parallel="ddp").parallel)


def test_modules_in_a_dictionary_keep_plain_names() -> None:
    model: Any = pair()
    names = [*model.state_dict()]
    with group_of_one():
        model["generator"] = torch.compile(_wrapped(model["generator"]))
        model["discriminator"] = _wrapped(model["discriminator"])
        assert [name for (name,) in snapshot_model(model)] == names
        with named_as_saved(model):
            here = [name for name, _ in model.named_parameters()]
            inside = [name for one in model.values() for name, _ in one.named_parameters()]
        assert here == names
        assert inside == [name.partition(".")[2] for name in names]


def test_ddp_in_any_group_is_copied_with_parameters_of_its_own() -> None:
    with group_of_one():
        model = _wrapped(net())
        with named_as_saved(model):
            average = AveragedModel(model)
        copied = average.module
        assert isinstance(copied, type(model))
        assert copied.process_group is model.process_group
        assert {*copied.parameters()}.isdisjoint(model.parameters())
        assert {*dict(copied.named_parameters()).values()} == {*copied.parameters()}
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        average.update_parameters(model)
        copied(torch.ones(2, 8)).sum().backward()
        assert all(one.grad is not None for one in copied.parameters())
        assert torch.equal(next(copied.parameters()), next(model.parameters()))
        assert copy.deepcopy(copied).process_group is model.process_group
