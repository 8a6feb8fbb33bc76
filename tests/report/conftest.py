"""A browser for the tests of report.html, and the page of a sweep opened in it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcpbench.results import Row
from support.browser import Browser, chromium
from support.pages import write_page


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Callable[..., Browser]:
    """Open the page of a sweep of these rows; what it tells the console or asks for is an error."""

    def opened(rows: list[Row], title: str = "sweep", **how: object) -> Browser:
        browser.open(write_page(tmp_path, rows, title), **how)  # type: ignore[arg-type]
        assert browser.console() == []
        assert browser.requests() == []
        return browser

    return opened
