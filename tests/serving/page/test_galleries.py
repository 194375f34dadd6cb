"""The gallery tab shows the hits returned by the API, page by page."""

import httpx
from playwright.sync_api import Page, expect

from tests.serving.browsing import until
from tests.serving.page_driver import (
    NUM_ITEMS,
    choose_classes,
)


def test_a_gallery_shows_the_same_hits_as_the_api_and_the_items_below_the_threshold(
    page: Page, url: str
) -> None:
    search = f"{url}/v1/galleries/all/search"
    expected = httpx.post(search, json={"classes": [0], "limit": 1000}).json()["results"][0]["hits"]
    matches = 30  # two pages of hits; the other items are below the threshold
    threshold = expected[matches - 1]["score"]
    assert threshold > expected[matches]["score"]
    choose_classes(page, 0)
    page.get_by_label("Score threshold").fill(repr(threshold))
    page.get_by_role("tab", name="Query").press("ArrowRight")
    hits = page.locator(".hit")
    expect(hits).to_have_count(24)
    more = page.locator(".ranking .button")
    expect(page.locator(".ranking [role=status]")).to_contain_text(
        f"{matches} of {NUM_ITEMS} images reach the threshold"
    )
    more.press("Enter")
    expect(hits).to_have_count(matches)
    assert page.locator(".hit.no, .boundary").count() == 0
    expect(more).to_have_text("Show items below the threshold")
    more.press("Enter")
    expect(hits).to_have_count(NUM_ITEMS)
    expect(more).to_be_hidden()
    scores = [float(one.get_attribute("value") or 0) for one in hits.locator(".score").all()]
    assert scores == [hit["score"] for hit in expected]
    assert hits.locator(".file").all_inner_texts() == [hit["name"] for hit in expected]
    kinds = page.evaluate("[...document.querySelectorAll('.hits li')].map((one) => one.className)")
    assert kinds == ["hit yes"] * matches + ["boundary"] + ["hit no"] * (NUM_ITEMS - matches)
    until(page, "document.querySelectorAll('.hit img').length === 40")
