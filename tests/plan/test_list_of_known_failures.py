"""The list of known failures: complete, and refused where it is wrong."""

from pathlib import Path

import pytest
import yaml

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import conf_folder
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.plugins import Plugin
from dcpbench.plan import known_failures
from dcpbench.plan.known_failures import default_list, read
from dcpbench.verdict.known_failures import explaining


def test_own_list_is_valid() -> None:
    """Plug-ins test that what recomputes its mismatches is there."""
    path = conf_folder() / "known_failures.yaml"
    every = {each["id"] for each in yaml.safe_load(path.read_text())}
    ids = {each.id for each in read(path)}
    assert ids
    assert ids <= every
    for each in default_list():
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
        (
            one_listed("{name: a, problem: differs}"),
            "checks.model_equal.problem: unknown key; did you mean problems",
        ),
        (one_listed("{name: a, problems: differs}"), "problems=differs: must be a list"),
        (one_listed(".*"), r"checks.model_equal=\.\*: must be a mapping"),
        ("- {ids: a}", "ids: unknown key; did you mean id"),
        ("- {id: a, torch: '>=2', reason: b}", "neither checks nor an error"),
        ("- {id: a, torch: '>=2', error: {type: KeyError}, reason: b}", "error.phases: has no value"),
        *(
            (
                f"- {{id: a, torch: '>=2', error: {{type: A, phases: [load], {more}}}, reason: b}}",
                "unterminated",
            )
            for more in ("message: '('", "code: '('", "each: '('", "of: [a, '(']")
        ),
        ("- {id: a, torch: '>=2', error: {type: '(', phases: [load]}, reason: b}", "known_failures="),
        (
            "- {id: a, torch: '>=2', error: {type: A, phases: []}, status: fail, reason: b}",
            "status 'fail'",
        ),
        ("- [", "known_failures="),
        ("- {id: a, torch: '>=2', torch: '>=3', reason: b}", "found duplicate key torch"),
    ],
)
def test_wrong_list_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read(path)


def test_entry_without_its_recomputation_is_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a cell that needs it fails."""
    mine = Plugin(name="mine", api=1, defects={"one_replica": "nowhere:defect"})
    monkeypatch.setattr(known_failures, "plugins", lambda: [mine])
    path = tmp_path / "list.yaml"
    checks = "checks: {{model_equal: [{{name: w, problems: [differs]{1}}}]}}"
    entry = f"{{{{id: {{0}}, cells: {{{{}}}}, torch: '>=2', reason: why, {checks}}}}}"
    by = {"plain": "", "held": ", by: checkpoint", "known": ", by: one_replica", "lost": ", by: nobody_knows"}
    path.write_text("".join(f"- {entry.format(*one)}\n" for one in by.items()))
    assert [one.id for one in known_failures.read(path)] == ["plain", "held", "known"]
    told = "dcpbench: list.yaml: lost: ignored: no installed plug-in can check it\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr(known_failures, "plugins", list)
    left = known_failures.read.__wrapped__(path)
    assert [one.id for one in left] == ["plain", "held"]
    differs = Mismatch("w", Problem.differs, by="one_replica")
    assert not explaining(left[1:], {"model_equal": [differs]}, []).is_complete
