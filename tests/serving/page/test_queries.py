"""Queries about images and texts on the page show the same verdicts as the API."""

import re
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.noise_images import image
from tests.serving.browsing import visit
from tests.serving.in_process import application, listening
from tests.serving.page_driver import (
    NAMES,
    add_images,
    api_verdicts,
    assert_same_verdicts,
    choose_classes,
    file,
    shown_verdicts,
)
from tests.tiny_bundle import write_of_texts


def test_classes_and_images_can_be_selected_with_the_keyboard_alone(page: Page, url: str) -> None:
    contents = [image(seed) for seed in range(7)]  # need more than two requests
    files = [file(f"{index}.png", content) for index, content in enumerate(contents)]
    page.on("filechooser", lambda opened: opened.set_files(files))  # type: ignore[arg-type]
    expect(page.locator("#class-input")).to_be_focused()
    page.keyboard.type("käse")
    expect(page.get_by_role("option")).to_have_text([re.compile("Käsekuchen, groß")])
    page.keyboard.press("Enter")
    page.keyboard.type("never")
    expect(page.get_by_role("option")).to_have_count(1)
    page.keyboard.press("Enter")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "choose files":
            break
    expect(page.get_by_role("button", name="choose files")).to_be_focused()
    expect(page.locator(".chip")).to_have_count(2)
    page.keyboard.press("Enter")
    expect(page.locator(".verdict")).to_have_count(14)
    expected = api_verdicts(url, contents, classes=[0, 6], recall=0.9)
    assert_same_verdicts(shown_verdicts(page), expected)
    words = {word for card in expected for _, _, word in card}
    assert words == {"Yes", "No"}
    yes = sum(card[1][2] == "Yes" for card in expected)
    expect(page.locator("#summary")).to_contain_text(f"{NAMES[6]}: yes for {yes} of 7")
    assert (
        page.locator("#cards .source").first.inner_text().startswith("threshold 0.00, recall 90%")
    )


def test_without_a_class_the_top_classes_are_shown_with_their_verdicts(
    page: Page, url: str
) -> None:
    contents = [image(seed) for seed in range(2)]
    add_images(page, *contents)
    expect(page.locator(".verdict")).to_have_count(10)
    every_class = api_verdicts(url, contents, classes=[*range(7)], recall=0.9)
    best = [sorted(card, key=lambda one: -one[1])[:5] for card in every_class]
    assert_same_verdicts(shown_verdicts(page), best)
    expect(page.locator("#summary")).to_contain_text("classes with the highest scores of 2 images")
    expect(page.locator("#cards .source").first).to_contain_text("threshold")
    expect(page.locator("#cards")).not_to_contain_text("NaN")
    page.get_by_label("Score threshold").fill("-100")
    expect(page.locator(".badge.yes")).to_have_count(10)
    choose_classes(page, 0)
    expect(page.locator(".verdict")).to_have_count(2)


def test_a_broken_image_shows_an_error_and_the_others_show_verdicts(page: Page, url: str) -> None:
    good = [image(seed) for seed in range(4)]
    add_images(page, good[0], b"not an image", good[1], b"", *good[2:])
    expect(page.locator("#summary")).to_contain_text("2 failed")
    choose_classes(page, 0)
    expect(page.locator(".verdict")).to_have_count(4)
    problems = page.locator(".card:nth-child(2) .problem, .card:nth-child(4) .problem")
    expect(problems).to_have_count(2)
    expect(page.locator(".problem")).to_have_count(2)
    assert "images[" not in problems.first.inner_text()
    verdicts = [card for card in shown_verdicts(page) if card]
    assert_same_verdicts(verdicts, api_verdicts(url, good, classes=[0], recall=0.9))
    expect(page.locator("#summary")).to_contain_text("2 failed")
    page.locator(".card:nth-child(2) .remove").click()
    expect(page.locator(".card")).to_have_count(5)
    page.locator("#clear").click()
    expect(page.locator("#results")).to_be_hidden()


def test_the_threshold_can_be_a_score_a_recall_or_none(page: Page, url: str) -> None:
    contents = [image(0)]  # a batch of one image, so that its score is bitwise reproducible
    choose_classes(page, 0, 6)
    add_images(page, *contents)
    expect(page.locator(".verdict")).to_have_count(2)
    expect(page.locator(".source").nth(1)).to_contain_text("pooled over all classes")
    expected = api_verdicts(url, contents, classes=[0, 6])
    threshold = expected[0][0][1]  # equal to the first score, so the first class matches
    page.get_by_label("Score threshold").fill(repr(threshold))
    expect(page.locator(".source").first).to_contain_text("custom")
    assert_same_verdicts(
        shown_verdicts(page), api_verdicts(url, contents, classes=[0, 6], threshold=threshold)
    )
    assert shown_verdicts(page)[0][0][2] == "Yes"
    page.get_by_label("recall 99%").check()
    expect(page.locator(".source").nth(1)).to_contain_text("no threshold")
    assert_same_verdicts(
        shown_verdicts(page), api_verdicts(url, contents, classes=[0, 6], recall=0.99)
    )
    page.get_by_label("none: show scores only").check()
    expect(page.locator(".badge")).to_have_count(0)
    expect(page.locator(".score")).to_have_count(2)
    scores = [float(one.get_attribute("value") or 0) for one in page.locator(".score").all()]
    assert scores == [score for card in expected for _, score, _ in card]


def test_each_line_of_text_is_queried(browser: Browser, tmp_path: Path) -> None:
    texts = ["a cat", "hund <b>& 猫</b> 🐶", "a dog", "and a cat", "x" * 301]
    api = application(write_of_texts(tmp_path / "texts"), max_inputs=2, max_text_chars=300)
    with listening(api) as url, visit(browser, url) as page:
        expect(page.locator("#tab-gallery")).to_be_hidden()
        page.keyboard.type("samo")
        page.keyboard.press("Enter")
        page.locator("#text-input").fill("\n\n".join(texts) + "\n")
        page.locator("#text-input").press("Control+Enter")
        expect(page.locator(".verdict")).to_have_count(4)
        assert_same_verdicts(
            shown_verdicts(page)[:4], api_verdicts(url, texts[:4], classes=[2], recall=0.9)
        )
        assert page.locator(".card .text").all_inner_texts() == texts
        expect(page.locator(".card:nth-child(5) .problem")).to_contain_text(
            "301 characters, but the limit is 300"
        )
