"""Take the pictures of README.md and docs/report.md: a report's page in Chromium, light and dark.

    python scripts/screenshots.py outputs/<sweep>/report.html docs/images
    python scripts/screenshots.py outputs/<script>/report.html docs/images   # of a script: one stop

needs selenium (`pip install -e '.[dev]'`) and Debian's chromium and chromium-driver.
"""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_OPEN = "document.querySelector('{}').click()"
_WORST = "#matrix .square:not(.s-pass)"


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("page", type=Path, help="a report.html")
    ask.add_argument("into", type=Path, help="folder of the pictures")
    asked = ask.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    sweep = [("report", 1340, 760, ""), ("cell", 980, 660, _OPEN.format(_WORST)), ("phone", 390, 844, "")]
    script = [("script", 860, 470, "document.querySelector('article.stop').scrollIntoView()")]
    with _browser() as browser:
        _show(browser, asked.page, 900, 600, "light")
        is_script = browser.execute_script("return document.querySelector('article.stop') !== null")
        for name, width, height, opens in script if is_script else sweep:
            for theme in ("light",) if is_script else ("light", "dark"):
                _show(browser, asked.page, width, height, theme)
                browser.execute_script(opens)
                (asked.into / f"{name}-{theme}.png").write_bytes(browser.get_screenshot_as_png())


def _show(browser: Chrome, page: Path, width: int, height: int, theme: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    browser.get("about:blank")
    browser.get(page.resolve().as_uri())
    ready = "return document.documentElement.dataset.ready === 'true'"
    WebDriverWait(browser, 20).until(lambda one: one.execute_script(ready))


@contextmanager
def _browser() -> Iterator[Chrome]:
    with tempfile.TemporaryDirectory() as profile:
        options = ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        # With its path selenium has no need to look for a driver elsewhere.
        browser = Chrome(options=options, service=ChromeService("/usr/bin/chromedriver"))
        try:
            yield browser
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
