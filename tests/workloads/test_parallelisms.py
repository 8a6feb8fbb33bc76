"""Parallelisms leave a workload as it is until it trains, and get their options."""

from unittest import mock

import torch

from dcpbench.config.groups import WorkloadConfig
from dcpbench.runs.build_run import build, mixed_precision_dtypes
from dcpbench.workloads.parallelisms import fully_shard_options
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


def test_null_in_a_policy_is_torchs_default() -> None:
    for policy in (
        {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": None},
        {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    ):
        given = config(parallel="fsdp2_mixed")
        given.parallel.options = {"mp_policy": policy, "offload_policy": None}
        assert fully_shard_options(given.parallel).keys() == {"mp_policy"}
        assert fully_shard_options(given.parallel)["mp_policy"].output_dtype is None
        assert mixed_precision_dtypes(given.parallel) == {torch.bfloat16, torch.float32}
    given.parallel.options = {"mp_policy": None}
    assert fully_shard_options(given.parallel) == {}
    assert mixed_precision_dtypes(given.parallel) == set()
