"""A live watch at the page: made, fed, heard and deleted; the camera."""

import base64
import json

import httpx
from playwright.sync_api import Browser, Page, Route, expect

from serving.config import ServingConfig
from tests.serving.at_the_page import (
    NAMES,
    TOKEN,
    answered,
    choose,
    file,
    image,
)
from tests.serving.browsing import until, visit


def test_a_watch_is_made_fed_with_images_heard_from_elsewhere_and_deleted(
    page: Page, url: str
) -> None:
    contents = [image(seed) for seed in range(7)]
    words = [card[0][2] for card in answered(url, contents, classes=[6], recall=0.9)]
    page.get_by_role("tab", name="Live watch").click()
    make = page.get_by_role("button", name="Watch for these classes")
    expect(make).to_be_disabled()
    choose(page, 6)
    page.get_by_label("nothing: show scores").check()
    expect(make).to_be_disabled()
    page.get_by_label("recall 90 %").check()
    make.click()
    row = page.locator(".watch")
    expect(row).to_contain_text(NAMES[6])
    expect(row.get_by_role("status")).to_have_text("listening")
    watch = httpx.get(f"{url}/v1/watches").json()["watches"][0]
    assert (watch["recall"], watch["classes"][0]["class_id"]) == (0.9, 6)

    files = [file(f"{place} <b>.png", content) for place, content in enumerate([*contents, b"x"])]
    page.locator("#room-watch input[type=file]").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator("#room-watch")).to_contain_text("8 frames answered, 1 hit")
    expect(page.locator("#room-watch")).to_contain_text("7 <b>.png: not an image")
    hits = page.locator(".heard")
    expect(hits).to_have_count(words.count("Yes"))
    expect(hits.first).to_contain_text(f"{words.index('Yes')} <b>.png")
    expect(hits.first.locator("img")).to_have_count(1)

    line = json.dumps({"image": base64.b64encode(contents[words.index("Yes")]).decode()})
    lines = {"content-type": "application/x-ndjson"}
    httpx.post(f"{url}/v1/feeds/gate-7", content=f"{line}\n", headers=lines).raise_for_status()
    expect(hits).to_have_count(words.count("Yes") + 1)
    expect(hits.first).to_contain_text("feed gate-7")

    before = watch["expires_at"]
    row.get_by_role("button", name="Renew").click()
    row.get_by_role("button", name="Stop listening").click()
    expect(row.get_by_role("button", name="Listen", exact=True)).to_be_visible()
    page.reload()
    expect(page.locator("#rooms")).to_be_visible()
    assert httpx.get(f"{url}/v1/watches").json()["watches"][0]["expires_at"] > before
    page.get_by_role("tab", name="Live watch").click()
    row.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert httpx.get(f"{url}/v1/watches").json() == {"watches": []}


def watch_at(page: Page) -> None:
    """Make a watch of class 6 in its room."""
    page.get_by_role("tab", name="Live watch").click()
    choose(page, 6)
    page.get_by_label("recall 90 %").check()
    page.get_by_role("button", name="Watch for these classes").click()


def test_a_frame_that_is_too_large_or_unreadable_is_named_and_the_others_are_answered(
    page: Page,
) -> None:
    watch_at(page)
    expect(page.locator(".watch").get_by_role("status")).to_have_text("listening")
    most = ServingConfig().max_frame_bytes
    page.evaluate(
        """() => {
          const read = FileReader.prototype.readAsDataURL;
          FileReader.prototype.readAsDataURL = function (blob) {
            if (blob.name !== "gone.png") return read.call(this, blob);
            Object.defineProperty(this, "error", { value: new DOMException("it has changed") });
            this.onerror();
          };
        }"""
    )
    files = [file("large.png", b"x" * (most + 1)), file("gone.png", image(0))]
    files += [file(f"{seed}.png", image(seed)) for seed in range(5)]
    room, drop = page.locator("#room-watch"), page.locator("#room-watch input[type=file]")
    drop.set_input_files(files[:1])  # type: ignore[arg-type]
    expect(room).to_contain_text("large.png: is over 4.0 MiB, the most of a frame")
    drop.set_input_files(files[1:2])  # type: ignore[arg-type]
    expect(room).to_contain_text("gone.png: cannot be read: it has changed")
    drop.set_input_files(files[2:])  # type: ignore[arg-type]
    expect(room).to_contain_text("7 frames answered")
    drop.set_input_files(file("nearly.png", b"x" * most))  # type: ignore[arg-type]
    expect(room).to_contain_text("nearly.png: not an image")
    page.get_by_role("button", name="Delete").click()


def test_a_watch_is_made_once_though_its_answer_is_lost(page: Page, url: str) -> None:
    posts = []

    def lose(route: Route) -> None:
        if route.request.method != "POST":
            route.continue_()
            return
        posts.append(route.fetch().status)
        route.abort("internetdisconnected")

    page.route("**/v1/watches", lose)
    watch_at(page)
    expect(page.locator("#room-watch")).to_contain_text("the server cannot be reached")
    expect(page.locator(".watch")).to_have_count(1)
    assert len(httpx.get(f"{url}/v1/watches").json()["watches"]) == len(posts) == 1
    page.get_by_role("button", name="Delete").click()
    expect(page.locator(".watch")).to_have_count(0)


def test_the_camera_feeds_a_watch_behind_a_token(browser: Browser, guarded_url: str) -> None:
    with visit(browser, guarded_url, is_started=False) as page:
        page.locator("#token-input").fill(TOKEN)
        page.locator("#token-input").press("Enter")
        expect(page.locator("#rooms")).to_be_visible()
        choose(page, 0)
        page.get_by_label("Score that decides").fill("-1000")
        page.get_by_role("tab", name="Live watch").click()
        page.get_by_role("button", name="Watch for these classes").click()
        expect(page.locator(".watch").get_by_role("status")).to_have_text("listening")
        page.get_by_role("button", name="Use the camera").click()
        expect(page.locator(".heard").first).to_contain_text(NAMES[0])
        until(page, "document.querySelector('.heard img').naturalWidth > 100")
        page.get_by_role("button", name="Stop the camera").click()
        expect(page.locator("video")).to_be_hidden()
        assert page.evaluate("document.querySelector('video').srcObject") is None
        page.get_by_role("button", name="Delete").click()
        expect(page.locator(".watch")).to_have_count(0)
