"""The live watch tab: watches, frames, hits and the camera."""

import base64
import json

import httpx
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from serving.config import ServingConfig
from tests.serving.browsing import until, visit
from tests.serving.page_driver import (
    NAMES,
    TOKEN,
    api_verdicts,
    choose_classes,
    file,
    image,
)


def test_a_watch_can_be_created_renewed_and_deleted_and_shows_hits_from_all_feeds(
    page: Page, url: str
) -> None:
    contents = [image(seed) for seed in range(7)]
    words = [card[0][2] for card in api_verdicts(url, contents, classes=[6], recall=0.9)]
    page.get_by_role("tab", name="Live watch").click()
    create = page.get_by_role("button", name="Watch for these classes")
    expect(create).to_be_disabled()
    choose_classes(page, 6)
    page.get_by_label("none: show scores only").check()
    expect(create).to_be_disabled()
    page.get_by_label("recall 90%").check()
    create.click()
    row = page.locator(".watch")
    expect(row).to_contain_text(NAMES[6])
    expect(row).to_contain_text("recall 90% (pooled) · expected precision unknown")
    expect(row.get_by_role("status")).to_have_text("listening")
    watch = httpx.get(f"{url}/v1/watches").json()["watches"][0]
    assert (watch["recall"], watch["classes"][0]["class_id"]) == (0.9, 6)

    files = [file(f"{index} <b>.png", content) for index, content in enumerate([*contents, b"x"])]
    page.locator("#panel-watch input[type=file]").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator("#panel-watch")).to_contain_text("8 frames processed, 1 hit")
    expect(page.locator("#panel-watch")).to_contain_text("7 <b>.png: not an image")
    hits = page.locator(".log-entry")
    expect(hits).to_have_count(words.count("Yes"))
    expect(hits.first).to_contain_text(f"{words.index('Yes')} <b>.png")
    expect(hits.first.locator("img")).to_have_count(1)

    line = json.dumps({"image": base64.b64encode(contents[words.index("Yes")]).decode()})
    lines = {"content-type": "application/x-ndjson"}
    httpx.post(f"{url}/v1/feeds/gate-7", content=f"{line}\n", headers=lines).raise_for_status()
    expect(hits).to_have_count(words.count("Yes") + 1)
    expect(hits.first).to_contain_text("feed gate-7")

    previous = watch["expires_at"]
    row.get_by_role("button", name="Renew").click()
    row.get_by_role("button", name="Stop listening").click()
    expect(row.get_by_role("button", name="Listen", exact=True)).to_be_visible()
    page.reload()
    expect(page.locator("#panels")).to_be_visible()
    assert httpx.get(f"{url}/v1/watches").json()["watches"][0]["expires_at"] > previous
    page.get_by_role("tab", name="Live watch").click()
    row.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert httpx.get(f"{url}/v1/watches").json() == {"watches": []}


def create_watch(page: Page) -> None:
    """Create a watch for class 6 in the live watch tab."""
    page.get_by_role("tab", name="Live watch").click()
    choose_classes(page, 6)
    page.get_by_label("recall 90%").check()
    page.get_by_role("button", name="Watch for these classes").click()


@pytest.mark.slow
def test_frames_that_are_too_large_or_unreadable_are_reported(
    page: Page,
) -> None:
    create_watch(page)
    expect(page.locator(".watch").get_by_role("status")).to_have_text("listening")
    limit = ServingConfig().max_frame_bytes
    page.evaluate(
        """() => {
          const read = FileReader.prototype.readAsDataURL;
          FileReader.prototype.readAsDataURL = function (blob) {
            if (blob.name !== "gone.png") return read.call(this, blob);
            Object.defineProperty(this, "error", { value: new DOMException("file changed") });
            this.onerror();
          };
        }"""
    )
    files = [file("large.png", b"x" * (limit + 1)), file("gone.png", image(0))]
    files += [file(f"{seed}.png", image(seed)) for seed in range(5)]
    panel, chooser = page.locator("#panel-watch"), page.locator("#panel-watch input[type=file]")
    chooser.set_input_files(files[:1])  # type: ignore[arg-type]
    expect(panel).to_contain_text("large.png: larger than the limit of 4.0 MiB")
    chooser.set_input_files(files[1:2])  # type: ignore[arg-type]
    expect(panel).to_contain_text("gone.png: cannot be read: file changed")
    chooser.set_input_files(files[2:])  # type: ignore[arg-type]
    expect(panel).to_contain_text("7 frames processed")
    chooser.set_input_files(file("nearly.png", b"x" * limit))  # type: ignore[arg-type]
    expect(panel).to_contain_text("nearly.png: not an image")
    page.get_by_role("button", name="Delete").click()


@pytest.mark.slow
def test_a_watch_is_created_only_once_if_the_response_is_lost(page: Page, url: str) -> None:
    posts = []

    def drop_response(route: Route) -> None:
        if route.request.method != "POST":
            route.continue_()
            return
        posts.append(route.fetch().status)
        route.abort("internetdisconnected")

    page.route("**/v1/watches", drop_response)
    create_watch(page)
    expect(page.locator("#panel-watch")).to_contain_text("the server cannot be reached")
    expect(page.locator(".watch")).to_have_count(1)
    assert len(httpx.get(f"{url}/v1/watches").json()["watches"]) == len(posts) == 1
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".watch")).to_have_count(0)


@pytest.mark.slow
def test_camera_frames_reach_a_watch_on_a_server_with_tokens(
    browser: Browser, guarded_url: str
) -> None:
    with visit(browser, guarded_url, is_started=False) as page:
        page.locator("#token-input").fill(TOKEN)
        page.locator("#token-input").press("Enter")
        expect(page.locator("#panels")).to_be_visible()
        choose_classes(page, 0)
        page.get_by_label("Score threshold").fill("-1000")
        page.get_by_role("tab", name="Live watch").click()
        page.get_by_role("button", name="Watch for these classes").click()
        expect(page.locator(".watch").get_by_role("status")).to_have_text("listening")
        page.get_by_role("button", name="Use the camera").click()
        expect(page.locator(".log-entry").first).to_contain_text(NAMES[0])
        until(page, "document.querySelector('.log-entry img').naturalWidth > 100")
        page.get_by_role("button", name="Stop the camera").click()
        expect(page.locator("video")).to_be_hidden()
        assert page.evaluate("document.querySelector('video').srcObject") is None
        page.get_by_role("button", name="Delete").click()
        expect(page.locator(".watch")).to_have_count(0)
