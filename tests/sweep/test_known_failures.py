"""Known failures: what is listed, and nothing beside it."""

from pathlib import Path

import pytest

from dcpbench.config.conf_folder import conf_folder
from dcpbench.config.errors import ConfigError
from dcpbench.sweep.plan.known_failures import KnownFailure, apply, read
from support.rows import row

LISTED = KnownFailure(
    id="moments",
    cells={"parallel": ["ddp", "fsdp"]},
    torch=">=2.11,<3",
    checks={"optim_equal": r"state\.w\..*"},
    reason="a test",
)


def after(status: str, failed: dict[str, list[str]], torch: str = "2.13.0+cpu", **columns: object) -> str:
    """The status that a row ends with."""
    seen = row(status=status, torch_version=torch, **columns)
    apply(seen, failed, [LISTED])
    return seen.status


def test_a_listed_failure_is_expected() -> None:
    assert after("fail", {"optim_equal": ["state.w.exp_avg"]}) == "xfail"


@pytest.mark.parametrize(
    "failed",
    [
        {"model_equal": ["w"]},
        {"optim_equal": ["state.w.exp_avg"], "model_equal": ["w"]},
        {"optim_equal": ["state.w.exp_avg", "param_groups.0.lr"]},
    ],
)
def test_anything_beside_it_is_a_failure(failed: dict[str, list[str]]) -> None:
    assert after("fail", failed) == "fail"


def test_other_cells_and_other_versions_are_not_covered() -> None:
    failed = {"optim_equal": ["state.w.exp_avg"]}
    assert after("fail", failed, parallel="hsdp") == "fail"
    assert after("fail", failed, torch="2.10.1") == "fail"


def test_a_listed_error_is_expected_and_no_other() -> None:
    listed = KnownFailure(
        id="names",
        cells={"parallel": "fsdp"},
        torch=">=2",
        error=r"rank \d in load: KeyError: .*",
        reason="x",
    )
    for reason, expected in (
        ("rank 3 in load: KeyError: 'a'", "xfail"),
        ("rank 3 in save: KeyError: 'a'", "error"),
        ("before rank 3 in load: KeyError: 'a'", "error"),
    ):
        seen = row(status="error", reason=reason, parallel="fsdp", torch_version="2.13.0")
        apply(seen, {}, [listed])
        assert seen.status == expected


@pytest.mark.parametrize(
    ("status", "expected"),
    [("pass", "xpass"), ("vacuous", "vacuous"), ("error", "error"), ("skip", "skip")],
)
def test_what_did_not_fail(status: str, expected: str) -> None:
    assert after(status, {}) == expected


def test_the_list_of_the_house_is_whole() -> None:
    known = read(conf_folder() / "known_failures.yaml")
    assert {each.id for each in known} == {
        "fsdp1-tp-optimizer-state",
        "fsdp1-tp-unfreezes",
        "compiled-fsdp1-names",
        "compiled-mutated-buffer",
    }
    for each in known:
        assert each.link is not None
        assert (Path(__file__).parents[2] / each.link).is_file()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {id: a, torch: '>=2', checks: {nope: .*}, reason: b}", "no check 'nope'"),
        ("- {id: a, cells: {nope: 1}, torch: '>=2', checks: {model_equal: .*}, reason: b}", "no column"),
        ("- {id: a, torch: new, checks: {model_equal: .*}, reason: b}", "new"),
        ("- {id: a, torch: '>=2', checks: {model_equal: '('}, reason: b}", "known_failures="),
        ("- {ids: a}", "ids"),
        ("- {id: a, torch: '>=2', reason: b}", "neither checks nor an error"),
        ("- [", "known_failures="),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read(path)
