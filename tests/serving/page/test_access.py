"""The page when the server requires a token, is busy or cannot be reached."""

from pathlib import Path

import httpx
from playwright.sync_api import Browser, expect

from tests.noise_images import image
from tests.serving.browsing import visit
from tests.serving.in_process import application, listening, occupied
from tests.serving.page_driver import (
    TOKEN,
    add_images,
    api_verdicts,
    assert_same_verdicts,
    choose_classes,
    shown_verdicts,
)
from tests.waiting import wait_until


def test_the_page_prompts_for_a_token_until_one_is_valid(
    browser: Browser, guarded_url: str
) -> None:
    assert httpx.get(f"{guarded_url}/v1/model").status_code == 401
    with visit(browser, guarded_url, is_started=False) as page:
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        page.keyboard.type("a-wrong-token-0123456789-0123456789")
        page.keyboard.press("Enter")
        expect(page.locator("#token-reason")).to_contain_text("rejected the last token")
        expect(dialog).to_be_visible()
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#panels")).to_be_visible()
        choose_classes(page, 0)
        add_images(page, image(0))
        expect(page.locator(".verdict")).to_have_count(1)
        stored = page.evaluate(
            "[localStorage.length, document.cookie, Object.values(sessionStorage)]"
        )
        assert stored == [0, "", [TOKEN]]
        assert TOKEN not in page.content()
        page.reload()
        expect(page.locator("#panels")).to_be_visible()
    with visit(browser, guarded_url, is_started=False) as page:
        expect(page.get_by_role("dialog")).to_be_visible()


def test_the_page_reports_a_busy_server_and_retries(browser: Browser, bundle: Path) -> None:
    api = application(bundle, max_requests=1, batch_wait_seconds=5)
    with listening(api) as url, visit(browser, url) as page:
        choose_classes(page, 0)
        with occupied(url):  # the only slot
            wait_until(lambda: httpx.post(f"{url}/v1/query").status_code == 429)
            add_images(page, image(0))
            expect(page.locator("#waiting")).to_contain_text("The server is busy")
            expect(page.locator(".verdict")).to_have_count(0)
        expect(page.locator(".verdict")).to_have_count(1, timeout=30_000)
        expect(page.locator("#waiting")).to_be_hidden()
        with listening(application(bundle)) as idle:
            expected = api_verdicts(idle, [image(0)], classes=[0], recall=0.9)
        assert_same_verdicts(shown_verdicts(page), expected)
