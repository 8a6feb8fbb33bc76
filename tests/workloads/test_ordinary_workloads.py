"""Workloads as people write them: each passes, is refused in one line that says what to do,
or meets a known failure of torch."""

from typing import Any

import pytest

from conftest import Finished, blocks, cells_of, in_make_test, run, selected
from support.notes import why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1300)]

UNKNOWN = "in which dcpbench finds no tensors: use dictionaries, lists, tuples or dataclasses of tensors"
REFUSED = {
    "wrong_state": "state: 'sampler' is a object without state_dict; add it",
    "too_small_batch": "1 sample for 2 shares: each needs one",
    "unknown_container": f"batch(generator) contains a Unknown, {UNKNOWN}",
    "loss_of_each_sample": "loss returned with 'mse' a Tensor of shape (4,); return a scalar tensor, or a",
    "raises_once_loaded": " in train after the load of step 2: ValueError: it was loaded (support/ordinary_",
    "raises_when_built": " in build without a save: FileNotFoundError: data.bin (support/ordinary_",
    "saves_nothing": "state of the Workload: 'average' is a ReLU with an empty state dict; leave it out",
    "lazy_module": "model: 0.weight has no shape before the first forward pass (a lazy module); call the",
    "average_of_a_model_without_copies": "TypeError: cannot pickle 'module' object",
    "own_key_error": " in save: KeyError: 'global' (support/refused_workloads.py:",
    "own_error_in_the_loss": ": RuntimeError: _chunk_cat expects non-empty tensor (support/refused_workloads",
    "own_storage_error": ": RuntimeError: setStorage: sizes [4] are out of bounds for storage of size 0",
    "wrong_call_with_a_closure": ": TypeError: CallsWrongly._update() takes 2 positional arguments but 3",
    "own_error_in_optimizer": ": TypeError: cannot pickle 'module' object (support/refused_workloads.py:",
    "unready_optimizer": " in train without a save: AssertionError (support/refused_workloads.py:",
    "packed_sequence": f"TypeError: contains a PackedSequence, {UNKNOWN}",
    "packed_values": "ValueError: shapes (12, 8), (4,) do not show what a sample is: pass share(",
    "equal_images": "ValueError: shapes (4, 8) do not show what a sample is: pass share(",
}
"""Parts of the reasons of workloads that are an error."""
NOT_RESTORED = {
    "low_state": "optim_equal",  # torch loads moments as float32
    "masters": "model_equal",
    "groups_of_other_members": "optim_equal",
    "forgets_the_sampler": "loss_resume_equal",
    "forgets_python_random": "random_equal",
    "forgets_its_generator": "random_equal",
}
"""A failed check of workloads whose training is right and whose checkpoint is not."""
WRONG = {
    "unaveraged_gan": "gradient_close",
    "weights_clipped_on_ranks_alone": "step_equal",
    "groups_by_type": "step_equal",
    "set_by_first_batch": "model_equal: rank 1: scale",  # no known failure, as of experts
    "clipped_by_norm_of_a_part": "gradient_close",
}
"""The check that reports a wrong training."""
BLOCKS = cells_of("ordinary_workloads")
"""Of those that are not extended `make test` has the first workload or model, under the last parallelism. It
restarts one of them, as a restart takes three times the processes."""

BUFFERS = "known failure buffers-of-some-rank: unsharded tensors are saved by one rank"
FROZEN = "known failure state-of-frozen: set_optimizer_state_dict drops the state of frozen parameters"
TOUCHED = "known failure touched-optimizer-state"
NO_GRADIENT = "known failure state-of-no-gradient"
TWO_NAMES = "known failure module-under-two-names: set_model_state_dict adds the prefix of DDP"
STATELESS = "known failure stateless-optimizer: set_optimizer_state_dict requires state of all parameters"
TENSOR_LR = "known failure tensor-lr-in-defaults"
ONE_SHARD = "known failure fsdp1-one-shard"
DTENSOR_STEP = "known failure dtensor-step: DTensor refuses an operation of the optimizer's step"
LATE = (
    "known failure second-derivatives-fsdp2: fully_shard reduces some gradients of second derivatives in the "
    "next step, if there is one before a load"
)
BESIDE_LATE = "in addition to known failure second-derivatives-fsdp2: "
TORCHS: dict[str, dict[str, tuple[str, str]]] = {
    "batch_norm": {
        "fault=": ("fail", "in addition to known failure buffers-of-some-rank: "),
        "parallel=ddp,save=sync_dedup_lowest,": ("pass", ""),
        "": ("xfail", BUFFERS),
    },
    "batch_norm_of_parts": {"": ("xfail", BUFFERS)},
    "gan": {"parallel=hsdp,": ("xfail", ONE_SHARD), "": ("pass", "")},
    "frozen_target_with_buffers": {"": ("xfail", BUFFERS)},
    "tied_module": {"parallel=ddp,": ("xfail", TWO_NAMES), "": ("pass", "")},
    "tied_norm": {"": ("xfail", TWO_NAMES)},
    "tied_and_other_key": {"": ("error", "RuntimeError: Error(s) in loading state_dict for _CopiedDDP: ")},
    "stateless_beside_adamw": {"": ("xfail", STATELESS)},
    "momentum_in_one_group": {"": ("xfail", STATELESS)},
    "forgets_a_parameter": {"": ("error", "RuntimeError: Missing")},
    "running_center": {
        "fault=": ("fail", "in addition to known failure buffers-of-some-rank: "),
        "": ("xfail", BUFFERS),
    },
    "large_buffers": {"": ("xfail", BUFFERS)},
    "buffer_of_no_rank": {"": ("fail", "known failure buffers-of-some-rank: model_equal: net.1.running_var")},
    "averaged_norm": {"": ("xfail", BUFFERS)},
    "wrong_average_in_load": {
        "": ("fail", "known failure buffers-of-some-rank: extra_equal: average.module.1.running_var")
    },
    "wrong_buffer_in_load": {"": ("fail", "net.1.running_var (buffer) in the checkpoint")},
    "unused_parameters": {
        "parallel=ddp,": ("error", "find_unused_parameters"),
        "": ("xfail", NO_GRADIENT),
    },
    "unused": {"parallel=ddp,": ("skip", ""), "": ("xfail", NO_GRADIENT)},
    "unused_on_one_rank": {"": ("error", "find_unused_parameters")},
    "unused_and_unsaved_state": {
        "": ("error", "(before that checkpoint_whole: rank 0: optimizer.state.parts.used")
    },
    "forgets_state_of_used": {
        "": ("error", "RuntimeError: Missing key in checkpoint state_dict: optimizer.state.0.weight.")
    },
    "tensor_lr": {"": ("xfail", TENSOR_LR)},
    "tensor_lr_and_changed_default": {"": ("fail", f"in addition to {TENSOR_LR}: flags_equal: defaults.lr")},
    "schedule_free": {
        "fault=weight": ("fail", f"in addition to {TOUCHED}: model_equal: 0.weight"),
        "fault=second": ("fail", f"in addition to {TOUCHED}: "),
        "": ("xfail", TOUCHED),
    },
    "prodigy": {"": ("xfail", TOUCHED)},
    "prodigy_and_lost_start": {"": ("fail", f"in addition to {TOUCHED}: optim_equal: state.0.bias.p0")},
    "scalar_parameter": {
        "parallel=ddp,": ("pass", ""),
        "": ("skip", "known failure fsdp-scalar: FSDP shards no parameter without dimensions; make it a"),
    },
    "channels_last": {
        "fault=weight_nan": ("fail", "known failure fsdp1-memory-order: optim_equal: state.0."),
        "fault=second": ("fail", "known failure fsdp1-memory-order: loss_resume_equal"),
        "parallel=ddp,": ("pass", ""),
        "parallel=fsdp2": ("skip", "known failure fsdp2-memory-order: fully_shard takes only parameters in"),
        "": ("xfail", "known failure fsdp1-memory-order"),
    },
    "averaged_model": {
        "parallel=ddp,": ("pass", ""),
        "parallel=fsdp,": ("xfail", "known failure fsdp-deepcopy: FSDP refuses to copy a sharded model; av"),
        "": ("skip", "known failure fsdp-deepcopy: FSDP refuses to copy a sharded model; average its"),
    },
    "groups_by_dimension": {
        "parallel=fsdp,": (
            "skip",
            "FSDP1: parameters are one-dimensional here, so that 0.weight and",
        ),
        "": ("pass", ""),
    },
    "adafactor": {
        "parallel=ddp,": ("pass", ""),
        "parallel=fsdp,": ("skip", "Adafactor needs full matrices, which FSDP1 flattens"),
        "": ("skip", f"{DTENSOR_STEP}; use parallel=ddp"),
    },
    "steps_by_indices": {"parallel=ddp,": ("pass", ""), "": ("skip", DTENSOR_STEP)},
    "text_key_on_one_rank": {"": ("xfail", "known failure state-of-no-parameter: ")},
    "shards_its_optimizer": {"": ("skip", "known failure zero-redundancy-optimizer: ")},
    "sparse_gradients": {"": ("xfail", "known failure fsdp-sparse-gradients: ")},
    "two_dtypes": {"": ("skip", "known failure fsdp-dtypes: ")},
    "frozen_in_the_plan": {
        "fault=": ("fail", "fsdp1-tp-unfreezes: loss_resume_equal"),
        "": ("xfail", "fsdp1-tp-unfreezes"),
    },
    "wrong_scalar_in_load": {"": ("fail", "model_equal: rank 0: scale (param)")},
    "score_before_penalty": {
        "parallel=ddp,": ("pass", ""),
        "": ("xfail", "known failure second-derivatives-fsdp2"),
    },
    "raises_in_the_loss": {"": ("error", "RuntimeError: setStorage: ")},
    "frozen_layer": {"": ("xfail", FROZEN)},
    "named_tuple": {"component=freezing": ("xfail", FROZEN), "": ("pass", "")},
    "drops_trained_state": {
        "": ("fail", "in addition to known failure state-of-frozen: optim_equal: state.2.bias.")
    },
    "penalized": {
        "fault=weight": ("fail", f"{BESIDE_LATE}model_equal: 0.weight (param)"),
        "fault=second": ("fail", "loss_resume_equal: rank 0: loss of step "),
        "": ("xfail", "(docs/findings/second-derivatives-fsdp2.md); observed: training: gradient_close: "),
    },
    "penalized_sometimes": {"": ("xfail", LATE)},
    "critic_with_penalty": {
        "parallel=ddp,": ("pass", ""),
        "parallel=fsdp2,": ("pass", ""),
        "": ("xfail", LATE),
    },
    "penalized_and_wrong_later": {"": ("fail", f"training: {BESIDE_LATE}gradient_close")},
    "wrong_load_before_a_penalty": {"": ("fail", "model_equal: rank 0: net.0.bias (param)")},
    "integer_keys": {
        "fault=": ("fail", "in addition to known failure integer-keys: model_equal: 0.weight"),
        "": ("xfail", "known failure integer-keys: DCP loads the value of an integer key"),
    },
    "integer_keys_in_extra_state": {"": ("xfail", "known failure integer-keys: DCP loads the value of an")},
    "multi_step_and_buffers": {
        "fault=": ("fail", "in addition to known failure buffers-of-some-rank, integer-keys: "),
        "": ("xfail", "known failure buffers-of-some-rank, integer-keys: "),
    },
    "own_experts": {
        "key=model.local": (
            "fail",
            "in addition to known failure local-experts: model_equal: local.0.weight",
        ),
        "key=model.net": ("fail", "in addition to known failure local-experts: model_equal: net.0.weight"),
        "": ("xfail", "known failure local-experts: a tensor that is not a DTensor is treated"),
    },
    "empty_group": {"": ("xfail", "known failure empty-param-group: ")},
    "empty_group_and_wrong_rate": {
        "": ("fail", "in addition to known failure empty-param-group: optim_equal: param_groups.1.lr")
    },
    "key_error_once_loaded": {"": ("error", "after the load of step 2: KeyError: 'betas' (support/ord")},
    "index_error_in_the_load": {"": ("error", " in load: IndexError: list index out of range (support/")},
    "tuples": {
        "": ("xfail", "known failure full-state-dict-tuples: a tuple among the hyperparameters becomes")
    },
    "tuples_and_wrong_scale": {
        "": ("fail", "in addition to known failure full-state-dict-tuples: optim_equal: param_groups.0.scale")
    },
    "weights_and_biases": {"": ("xfail", "known failure several-optimizers-fsdp1: FSDP1 requests the state")},
    "weights_and_biases_and_other_error": {
        "": ("error", "RuntimeError: 0.bias is not in the optimizer state")
    },
}
"""By workload, the status and a part of the reason of cells whose words contain a text, the first that fits.
A known failure hides no other."""


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = selected(request, "block")
    cells = {block: cell for block, cell in cells_of("ordinary_workloads").items() if block in asked}
    if in_make_test(request):
        trained = ("workload.target", "model")
        for block, cell in cells.items():
            cell |= {key: cell[key].partition(",")[0] for key in trained if key in cell}
            cell |= {"parallel": cell["parallel"].rpartition(",")[2], "restart": block == "workers"}
    return run(tmp_path_factory.mktemp("ordinary") / "sweep", *blocks(cells.values()), timeout_s=1200)


def expected(row: dict[str, Any]) -> tuple[str, str]:
    """Return the status of a row and a part of its reason."""
    name = row["model"].rpartition(".")[2]
    if name in REFUSED:
        return "error", REFUSED[name]
    if check := (NOT_RESTORED | WRONG).get(name):
        return "fail", check
    ends = TORCHS.get(name, {"": ("pass", "")}).items()
    return next(end for words, end in ends if words in row["cell"])


def wrongly_trained(row: dict[str, Any]) -> bool:
    late = LATE, f"training: {BESIDE_LATE}gradient_close", f"{BESIDE_LATE}model_equal: 0.weight"
    return (
        row["model"].rpartition(".")[2] in WRONG
        or str(row["reason"]).startswith((ONE_SHARD, *late))
        or (row["parallel"] == "fsdp_tp")
    )


@pytest.mark.parametrize("block", BLOCKS)
def test_ordinary_workloads_end_as_expected(sweep: Finished, block: str) -> None:
    assert sweep.rows, sweep.err
    wrong = {}
    for row in sweep.rows:
        status, reason = expected(row)
        trained = row["training"] is not False
        if row["status"] != status or reason not in str(row["reason"]) or trained == wrongly_trained(row):
            wrong[row["cell"]] = row["status"], row["training"], row["reason"]
    assert wrong == {}


@pytest.mark.parametrize("block", ["large_buffers"])
def test_resume_without_the_saved_values_is_not_applied(sweep: Finished, block: str) -> None:
    large = [row for row in sweep.rows if row["model"].endswith("large_buffers")]
    assert large
    for row in large:
        assert row["loss_resume_equal"] is row["loss_resume_close"] is row["state_resume_equal"] is None
        reasons = {why_not(one).get("state_resume_equal") for one in row["details"]["ranks"]}
        known = "(buffers_of_some_rank), and its saved value cannot be set"
        assert any(str(reason).endswith(known) for reason in reasons), reasons


@pytest.mark.parametrize("block", ["late_gradients"])
def test_late_gradients_leave_the_resume_out(sweep: Finished, block: str) -> None:
    late = [row for row in sweep.rows if str(row["reason"]).startswith(LATE)]
    assert late
    for row in late:
        assert (row["model_equal"], row["optim_equal"], row["extra_equal"]) == (True, True, True)
        assert row["loss_resume_equal"] is row["state_resume_equal"] is None
        reasons = [why_not(one).get("state_resume_equal", "") for one in row["details"]["ranks"]]
        assert reasons[-1].endswith("(docs/findings/second-derivatives-fsdp2.md)")
