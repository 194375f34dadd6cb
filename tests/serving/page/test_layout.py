"""The layout of the page: escaping, narrow windows, contrast and notices."""

from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.noise_images import image
from tests.serving.browsing import visit
from tests.serving.in_process import application, listening
from tests.serving.page_driver import (
    NAMES,
    choose_classes,
    file,
)
from tests.tiny_bundle import write


def fits(page: Page) -> bool:
    """Return whether the page fits the width of its window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_class_and_file_names_are_never_parsed_as_html(page: Page) -> None:
    page.locator("#class-input").click()
    expect(page.get_by_role("option")).to_have_count(len(NAMES))
    assert page.locator("[role=option] .option-name").all_inner_texts() == list(NAMES)
    choose_classes(page, 1, 2, 5)
    files = [file("<img src=x onerror=alert(1)>.png", image(0)), file('"><b>.png', b"broken")]
    page.locator("#choose input").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator(".verdict")).to_have_count(3)
    assert page.locator(".class-name").all_inner_texts() == [NAMES[1], NAMES[2], NAMES[5]]
    assert page.locator(".file").all_inner_texts() == [one["name"] for one in files]
    assert page.evaluate("window.broken") is None
    assert page.locator("main b, main script, img[src=x]").count() == 0
    page.locator("#tab-gallery").click()
    expect(page.locator(".ranking h2")).to_have_text([NAMES[1], NAMES[2], NAMES[5]])


def test_the_page_fits_a_window_360_pixels_wide(browser: Browser, url: str) -> None:
    with visit(browser, url, viewport={"width": 360, "height": 720}, has_touch=True) as page:
        assert fits(page)
        page.locator("#class-input").click()
        expect(page.get_by_role("option")).to_have_count(len(NAMES))
        assert fits(page)
        choose_classes(page, 4, 0, 2)
        page.locator("#choose input").set_input_files(
            [file("w" * 90 + ".png", image(0)), file("b.png", b"broken")]  # type: ignore[list-item]
        )
        expect(page.locator(".verdict")).to_have_count(3)
        expect(page.locator("#thresholds li")).to_have_count(3)
        expect(page.locator("#cards .source").first).to_be_hidden()  # repeats the list above
        assert fits(page)
        page.locator("#tab-gallery").click()
        expect(page.locator(".ranking")).to_have_count(3)
        page.locator(".ranking .button:visible").first.click()
        expect(page.locator(".hit").first).to_be_visible()
        assert fits(page)


def test_the_page_warns_about_a_loss_that_is_not_aligned(
    browser: Browser, page: Page, tmp_path: Path
) -> None:
    expect(page.locator("#notice")).to_be_hidden()
    changes = {"loss": {"kind": "ce", "aligned": False}}
    bundle = write(tmp_path / "pets", changes=changes)
    with listening(application(bundle)) as url, visit(browser, url) as other:
        expect(other.locator("#notice")).to_contain_text("trained with ce, which is not aligned")
