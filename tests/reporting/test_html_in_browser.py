"""The HTML report in a browser without a network: no errors, no requests, no serious findings of
axe, on wide and narrow screens.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from autotune.reporting.html import write_study_report
from tests.reporting.test_html import a_study, hostile_study, large_study

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome is installed"),
]

SCREENS: dict[str, dict[str, Any]] = {
    "laptop": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Browser, path: Path, said: list[str], **screen: Any) -> Page:
    """The page, with what it said and asked for beside itself in ``said``."""
    page = browser.new_context(offline=True, **screen).new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: said.append(request.url) if request.url != path.as_uri() else None,
    )
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("name", SCREENS)
def test_a_study_opens_offline_on_every_screen_and_axe_finds_nothing_serious(
    browser: Browser, tmp_path: Path, name: str
) -> None:
    said: list[str] = []
    path, screen = write_study_report(large_study(tmp_path / "one", 60)), SCREENS[name]
    page = opened(browser, path, said, **screen, bypass_csp=True)  # axe is a script of another's
    assert page.locator(".chart .main-svg").count() >= page.locator(".chart").count() == 5
    assert page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
    assert said == []
    page.evaluate("document.querySelectorAll('details').forEach(element => element.open = true)")
    assert [
        (violation["id"], violation["impact"])
        for violation in Axe().run(page).response["violations"]
    ] == []


def test_texts_of_others_do_nothing_and_are_shown(browser: Browser, tmp_path: Path) -> None:
    said: list[str] = []
    path = write_study_report(hostile_study(tmp_path))
    page = opened(browser, path, said)
    assert page.locator(".chart text", has_text="<script>alert(1)</script>").count() > 0
    assert page.locator(".chart a").count() == 0
    page.fill("#trial", "0")
    assert "<img src=x" in page.inner_text("#picked")
    assert said == []


def test_a_trial_is_shown_in_every_chart(browser: Browser, tmp_path: Path) -> None:
    said: list[str] = []
    page = opened(browser, write_study_report(a_study(tmp_path / "one")), said)
    page.fill("#trial", "1")
    assert page.inner_text("#picked").startswith("trial 1, REACHED, 4.00 s")
    ends = page.evaluate(
        "['search', 'curves'].map(name => document.getElementById('chart-' +"
        " name).data.at(-1).x.length)"
    )
    assert ends == [1, 6], "with the gap after a line"
    page.fill("#trial", "77")
    assert page.inner_text("#picked") == "no such trial"
    assert said == []
