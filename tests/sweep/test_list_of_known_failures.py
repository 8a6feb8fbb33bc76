"""The list of known failures: complete, and refused where it is wrong."""

from pathlib import Path

import pytest

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import conf_folder
from dcpbench.sweep.plan.known_failures import listed, read


def test_the_list_of_the_house_is_whole() -> None:
    known = read(conf_folder() / "known_failures.yaml")
    assert {each.id for each in known} == {
        "fsdp1-tp-optimizer-state",
        "fsdp1-tp-unfreezes",
        "tensor-lr-in-defaults",
        "compiled-fsdp1-names",
        "compiled-mutated-buffer",
        "fsdp1-one-shard",
        "stager-used-once",
        "shared-stager",
        "shared-writer",
        "writer-threads",
        "state-of-frozen",
        "state-in-low-precision",
        "unfrozen-in-bf16",
        "load-without-collectives",
        "full-state-dict-tuples",
        "full-state-dict-tp",
        "empty-param-group",
        "state-of-no-gradient",
        "buffers-of-some-rank",
        "integer-keys",
        "grown-object",
        "gradients-at-load",
        "scheduler-after-load",
        "plain-optimizer-fsdp1",
        "several-optimizers-fsdp1",
        "data-loader-generator",
        "metadata-of-newer-torch",
        "local-experts",
        "other-dtype",
        "broadcast-ddp",
        "file-writer-safetensors",
        "safetensors-values",
        "consolidated-integers",
        "consolidated-scalars",
        "pipeline-param-groups",
        "compiled-in-checkpoint-wrapper",
        "gradient-divide-factor",
        "flat-fsdp1-names",
    }
    for each in listed():
        assert each.link is not None
        assert (Path(__file__).parents[2] / each.link).is_file()


def one_listed(mismatch: str) -> str:
    """A list with one entry of one mismatch."""
    return f"- {{id: a, torch: '>=2', checks: {{model_equal: [{mismatch}]}}, reason: b}}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {id: a, torch: '>=2', checks: {nope: []}, reason: b}", "no check 'nope'"),
        ("- {id: a, cells: {nope: 1}, torch: '>=2', checks: {model_equal: []}, reason: b}", "no column"),
        ("- {id: a, torch: new, checks: {model_equal: []}, reason: b}", "new"),
        (one_listed("{name: '(', problems: [differs]}"), "known_failures="),
        (one_listed("{name: a, problems: [wrong]}"), "no problem 'wrong'"),
        (one_listed("{name: a}"), "problems"),
        (one_listed("{name: a, problem: differs}"), "problem"),
        (one_listed(".*"), "known_failures="),
        ("- {ids: a}", "ids"),
        ("- {id: a, torch: '>=2', reason: b}", "neither checks nor an error"),
        ("- {id: a, torch: '>=2', error: {type: KeyError}, reason: b}", "missing mandatory value: phase"),
        ("- [", "known_failures="),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read(path)
