"""Chromium for the page tests.

Every visit fails if the page logs an error to the console or sends a request to another origin.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

# Chromium itself logs these messages when a test causes a request to be rejected or interrupted.
_EXPECTED_ERRORS = (
    "Failed to load resource: the server responded with a status of 4",
    "Failed to load resource: net::ERR_INTERNET_DISCONNECTED",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the installed Chromium in headless mode, or skip the test if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(
    browser: Browser, url: str, *, is_started: bool = True, **options: object
) -> Iterator[Page]:
    """Open the page at `url` in a new profile and wait until it has loaded. Pass `is_started=False`
    if the page will prompt for a token first."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options})
    context.set_default_timeout(10_000)
    page = context.new_page()
    errors: list[str] = []
    requested: list[str] = []
    page.on("console", lambda entry: errors.append(entry.text) if entry.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: requested.append(request.url))
    try:
        page.goto(url)
        if is_started:
            page.locator("#panels:not([hidden])").wait_for()
        yield page
        assert [error for error in errors if not error.startswith(_EXPECTED_ERRORS)] == []
        own = (url, url.replace("http", "ws", 1), f"blob:{url}")
        assert [address for address in requested if not address.startswith(own)] == []
    finally:
        context.close()


def until(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true. `Page.wait_for_function` would evaluate it inside
    the page, which the page's Content-Security-Policy forbids.
    """
    deadline = time.monotonic() + 60
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"still false after 10 s: {expression}"
        time.sleep(0.02)
