"""A real server for a real browser: the application on a free port, and a page that is watched.

What a page must never do is looked for at the end of every visit: errors in its console, requests
that leave its origin.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

# What Chromium itself says of a request that was refused, or that a test has cut off; the page
# shows what came of it.
_REFUSED = (
    "Failed to load resource: the server responded with a status of 4",
    "Failed to load resource: net::ERR_INTERNET_DISCONNECTED",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """The machine's own Chromium, without a window; skips where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    # An image that moves stands in for a camera.
    camera = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=camera)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(
    browser: Browser, url: str, *, is_started: bool = True, **options: object
) -> Iterator[Page]:
    """The page at `url` in a profile of its own, ready unless it asks for a token first."""
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options})
    context.set_default_timeout(10_000)
    page = context.new_page()
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    try:
        page.goto(url)
        if is_started:
            page.locator("#rooms:not([hidden])").wait_for()
        yield page
        assert [error for error in errors if not error.startswith(_REFUSED)] == []
        own = (url, url.replace("http", "ws", 1), f"blob:{url}")
        assert [address for address in asked if not address.startswith(own)] == []
    finally:
        context.close()


def until(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true. `Page.wait_for_function` would evaluate it inside
    the page, whose policy forbids that."""
    deadline = time.monotonic() + 10
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        time.sleep(0.02)
