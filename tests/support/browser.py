"""A headless Chromium that is asked about a page: what it shows, what it ran, what it wanted to load."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """One window; every page is opened afresh, with nothing stored."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self.page = ""

    def open(
        self,
        page: Path,
        *,
        at: str = "",
        width: int = 1400,
        height: int = 1000,
        dark: bool = False,
        media: str = "",
        drawn: str = "html[data-ready=true]",
    ) -> None:
        """Open a page at `#at` and wait until it has drawn itself: something matches the selector `drawn`."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.emulate(dark=dark, media=media)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.page = page.resolve().as_uri()
        self.driver.get(f"{self.page}#{at}")
        WebDriverWait(self.driver, 20).until(lambda _: self.all(drawn), f"nothing matches {drawn}")

    def emulate(self, *, dark: bool = False, media: str = "") -> None:
        """Emulate a colour scheme, and printing (`media="print"`)."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": scheme})

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[WebElement]:
        """Return the matching elements that are visible."""
        return [one for one in self.driver.find_elements(By.CSS_SELECTOR, selector) if one.is_displayed()]

    def one(self, selector: str) -> WebElement:
        (found,) = self.all(selector)
        return found

    def text(self, selector: str) -> str:
        return self.driver.find_element(By.CSS_SELECTOR, selector).text

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """The accessible name, or the text, of what has the focus."""
        return str(self.js("const it = document.activeElement; return it.ariaLabel ?? it.textContent"))

    def console(self) -> list[str]:
        """What the console was told since the page was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the requests since the page was opened, other than the page itself."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in sent if url != self.page]


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """Skips where there is no Chromium, but fails where `CI` is set: there it has to be."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        said = f"needs {CHROMIUM} and {DRIVER} (Debian: apt-get install chromium chromium-driver)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(said)
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With its path selenium has no need to look for a driver elsewhere.
    driver = Chrome(options=options, service=ChromeService(str(DRIVER)))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
