"""junit.xml is what the readers of JUnit take: by the schema of Jenkins' xUnit plugin, and by one of them.

`junit-10.xsd` is the plugin's (MIT), word for word as it comes with the sources of pytest 8.3.5.
"""

from pathlib import Path

import junitparser
import pytest
from lxml import etree

from dcpbench.report.show import write_reports
from report.sweeps import cell, folder_with

SCHEMA = etree.XMLSchema(etree.parse(Path(__file__).with_name("junit-10.xsd")))
NASTY = "a ]]> b <c> & \x00\x1b[31m \ud7ff\ufffe \U0001f600 \"'"


@pytest.fixture
def every_status(tmp_path: Path) -> Path:
    ends = ["pass", "fail", "vacuous", "xpass", "error", "crash", "timeout", "skip", "xfail"]
    rows = [cell(repeat=n, status=end, reason=f"{end}: {NASTY}", cell_s=1234.5) for n, end in enumerate(ends)]
    folder = folder_with(
        tmp_path / "s",
        *rows,
        cell("fsdp", status="crash", flaky=True, reason="rank 1 died"),
        cell("fsdp", repeat=1, retry_of=0),
        cell("hsdp", status="fail", fault="lr", fault_seen=True, reason="optim_equal: lr"),
        cell("hsdp2", status="pass", fault="lr", fault_seen=False, reason="fault=lr was not seen"),
        cell("fsdp2", status="fail", reason="random_equal: no", random_equal=False, model_equal=True),
        cell("none", status="crash", reason="died", details={"rank": 2, "log_tail": ["Traceback", NASTY]}),
    )
    (folder / "environment.json").write_text('{"torch": "2.13", "gpus": ["H200"], "cuda": null}')
    return folder


def read_back(folder: Path) -> junitparser.TestSuite:
    write_reports(folder, None)
    document = etree.parse(folder / "junit.xml")
    SCHEMA.assertValid(document)
    (suite,) = junitparser.JUnitXml.fromfile(str(folder / "junit.xml"))
    counts = {name: document.getroot().get(name) for name in ("tests", "failures", "errors")}
    assert counts == {name: str(getattr(suite, name)) for name in counts}
    return suite


def test_junit_readers_count_the_same(every_status: Path) -> None:
    suite = read_back(every_status)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (15, 6, 4, 2)
    seen = [type(case.result[0]).__name__ if case.result else "passed" for case in suite]
    assert seen == [
        *["passed", "Failure", "Failure", "Failure", "Error", "Error", "Error", "Skipped", "Skipped"],
        *["Failure", "passed", "passed", "Failure", "Failure", "Error"],
    ]
    suite.update_statistics()
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (15, 6, 4, 2)
    assert suite.time == pytest.approx(9 * 1234.5)
    assert {item.name: item.value for item in suite.properties()} == {
        "torch": "2.13",
        "gpus": '["H200"]',
        "cuda": "null",
    }


def test_testcases_have_reason_and_command(every_status: Path) -> None:
    cases = {case.name: case for case in read_back(every_status)}
    failed = cases["parallel=ddp,save=sync,repeat=1"]
    assert failed.classname == "save_load.ddp"
    assert failed.result[0].message.startswith("fail: fail: a ]]> b <c> & \ufffd\ufffd[31m")
    assert "again: dcpbench run parallel=ddp save=sync repeat=1" in failed.result[0].text
    explained = cases["parallel=fsdp2,save=sync"].result[0].text.splitlines()
    assert explained[0].startswith("likely: Random generators were not restored")
    assert explained[1] == "random_equal: no"
    died = cases["parallel=none,save=sync"].system_out
    assert died is not None
    assert died.startswith("end of the log of rank 2:\nTraceback\na ]]> b")
    flaky = cases["parallel=fsdp,save=sync"]
    assert flaky.result[0].type == "flaky crash"
    assert cases["parallel=fsdp,save=sync,repeat=1"].is_passed, "its retry"
    assert cases["parallel=hsdp,save=sync"].system_out.startswith("injected fault lr was detected")


def test_cells_that_shared_devices_have_times(tmp_path: Path) -> None:
    rows = [cell(cell_s=2.5), cell("fsdp", shared_cell_s=4.25), cell("hsdp", status="skip")]
    suite = read_back(folder_with(tmp_path / "s", *rows))
    assert [case.time for case in suite] == [2.5, 4.25, 0]
    assert suite.time == 6.75


@pytest.mark.parametrize("details", [{"log_tail": "text"}, {"log_tail": [1, None], "rank": {"a": 1}}])
def test_details_of_another_shape_are_accepted(tmp_path: Path, details: object) -> None:
    assert read_back(folder_with(tmp_path / "s", cell(status="crash", details=details))).errors == 1
