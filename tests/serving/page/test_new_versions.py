"""The page does not mix the verdicts of two versions of the model."""

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.serving.browsing import visit
from tests.serving.published import publish, serving


def choose(page: Page) -> None:
    page.get_by_role("combobox").fill("husky")
    expect(page.get_by_role("option")).to_have_count(1)
    page.keyboard.press("Enter")


def test_a_page_that_was_loaded_with_another_version_asks_to_be_reloaded(
    browser: Browser, tmp_path: Path
) -> None:
    with serving(tmp_path) as served, visit(browser, served.url) as page:
        text = page.locator("#text-input")
        choose(page)
        text.fill("a cat")
        text.press("Control+Enter")
        expect(page.locator(".verdict")).to_have_count(1)
        publish(served.versions[1], served.path)
        served.model.poll()
        text.fill("und hund")
        text.press("Control+Enter")
        expect(page.locator("#cards")).to_contain_text("another version of the model")
        expect(page.locator(".verdict")).to_have_count(1)
        page.reload()
        choose(page)
        text.fill("und hund")
        text.press("Control+Enter")
        expect(page.locator(".verdict")).to_have_count(1)
