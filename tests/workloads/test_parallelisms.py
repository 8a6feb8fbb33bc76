"""Parallelisms leave a workload as it is until it trains."""

from unittest import mock

from dcpbench.config.groups import WorkloadConfig
from dcpbench.workloads.build_run import build
from dcpbench.workloads.workload import batches_of
from support.alone import config, group_of_one, world


def test_ddp_computes_no_gradients_before_the_first_step() -> None:
    given = config(
        parallel="ddp", workload=WorkloadConfig("support.ordinary_workloads.other_order"), train_steps=2
    )
    with group_of_one() as group:
        here = world(group=group)
        run = build(given, here, given.seed)
        batches = batches_of(given, here.device)
        assert run.model.module.gradients == 0
        assert all(value.grad is None for value in run.model.parameters())
        run.train(batches, 2)
        assert run.model.module.gradients == 12
        assert not isinstance(run.model.reducer._rebuild_buckets, mock.Mock)
        # If DDP's reducer held the group last, it would wait for the group's threads while it holds Python's
        # lock, for which one of them may wait.
        del run
