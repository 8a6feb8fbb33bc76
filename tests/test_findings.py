"""The pages of docs/findings have the same parts, and their index lists them and can be filtered."""

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.commands import ROOT, script

if TYPE_CHECKING:
    from support.browser import Browser

INDEX, RUNNER = script("scripts/findings_index"), script("scripts/findings")
FINDINGS = INDEX.findings()
PARALLELISM, TORCH, SEVERITY = range(3)


def test_the_index_lists_the_findings() -> None:
    written = INDEX.INDEX.read_text()
    assert INDEX.indexed(written) == written, "python scripts/findings_index.py"
    assert {f"{path.stem.replace('_', '-')}.md" for path in INDEX.FINDINGS.glob("*.py")} == {
        one.page for one in FINDINGS
    }


@pytest.mark.slow
def test_findings_are_still_there(capsys: pytest.CaptureFixture[str]) -> None:
    """One that runs alone, one on two ranks; `make findings` runs all."""
    assert RUNNER.main(["gradients-at-load", "local-experts"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"gradients-at-load +there +with gradients: steps of the parameters \[\]", printed)
    assert re.search(
        r"local-experts +there +rank 1: experts.0.weight was 2.0 when it was saved, is 1.0", printed
    )


SCRIPTS = {
    "print('as it should be')": (1, "gone", "as it should be"),
    "import nowhere": (2, "could not run", "ModuleNotFoundError: No module named 'nowhere'"),
    "import os; os.abort()": (0, "there", "died by SIGABRT"),
}


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_script_shows_whether_its_finding_is_there(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, word, line = SCRIPTS[text]
    (tmp_path / "gradients_at_load.py").write_text(
        f'"""A title.\n\npython gradients_at_load.py\n"""\n{text}\n'
    )
    monkeypatch.setattr(RUNNER, "FINDINGS", tmp_path)
    assert RUNNER.main(["gradients-at-load"]) == status
    assert f"{word:13} {line}\n" in capsys.readouterr().out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.slow
@pytest.mark.browser
def test_the_index_filters_from_a_file(site: Path, browser: "Browser") -> None:
    browser.open(site / "findings/index.html", drawn="table[data-findings] td a")
    choose = (
        "const select = document.querySelectorAll('.findings-filters select')[arguments[0]];"
        "select.value = arguments[1]; select.dispatchEvent(new Event('input', { bubbles: true }))"
    )

    def shown() -> set[str]:
        links = browser.all("table[data-findings] td:first-child a")
        return {Path(link.get_attribute("href") or "").stem for link in links}

    def expected(parallelism: str, torch: str, severity: str = "") -> set[str]:
        return {
            Path(one.page).stem
            for one in FINDINGS
            if {parallelism, "any"} & {*one.parallelism}
            and torch in one.torch.partition("; not")[0]
            and severity in ("", one.severity)
        }

    assert shown() == {Path(one.page).stem for one in FINDINGS}
    browser.js(choose, PARALLELISM, "PP")
    browser.js(choose, TORCH, "2.13")
    assert shown() == expected("PP", "2.13")
    browser.js(choose, SEVERITY, "error")
    assert shown() == expected("PP", "2.13", "error")
    assert browser.text(".findings-filters output") == f"{len(shown())} of {len(FINDINGS)} findings"
    assert 0 < len(shown()) < len(expected("PP", "2.13")) < len(FINDINGS)
    for place in (PARALLELISM, TORCH, SEVERITY):
        browser.js(choose, place, "")
    browser.one(".findings-filters input").send_keys("safetensors FILE")
    assert shown() == {Path(one.page).stem for one in FINDINGS if "safetensors file" in one.title.lower()}
    assert shown()
