"""The page at `/`, driven in a real Chromium against the real application in this process.

What a person reads there is compared with what the API answers. Only Ray is not there.
"""

import base64
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from typer import Typer
from typer.testing import CliRunner

from launch.commands import index
from serving.http.page import PAGE_PATHS
from tests.serving.browsing import chromium, until, visit
from tests.serving.in_process import application, listening
from tests.tiny_bundle import write, write_of_texts
from trainer.bundle_spec import ClassEntry

NAMES = (
    "Käsekuchen, groß",
    "<script>window.broken = 1</script>",
    "\"quoted\" & 'single' <img src=x onerror=alert(1)>",
    "猫 🐶 emoji",
    "très " + "long" * 40,
    "قطة سوداء",
    "never seen in validation",
)
TOKEN = "a-token-of-this-test-0123456789"
NUM_ITEMS = 40


def picture(seed: int) -> bytes:
    """A PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


def file(name: str, content: bytes) -> dict[str, object]:
    return {"name": name, "mimeType": "image/png", "buffer": content}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [ClassEntry(name=name, attributes={"kind": "<b>pet</b>"}) for name in NAMES]
    return write(tmp_path_factory.mktemp("bundles") / "pets", entries=entries)


@pytest.fixture(scope="module")
def gallery(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, path = (tmp_path_factory.mktemp(name) for name in ("collection", "galleries"))
    for place in range(NUM_ITEMS):
        (folder / f"{place} <i>.png").write_bytes(picture(place))
    app = Typer()
    app.command()(index.index)
    made = CliRunner().invoke(app, [str(bundle), str(folder), "-o", str(path / "all")])
    assert made.exit_code == 0, made.exception
    return path / "all"


@pytest.fixture(scope="module")
def url(bundle: Path, gallery: Path) -> Iterator[str]:
    with listening(application(bundle, max_inputs=3, galleries={"all": str(gallery)})) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with visit(browser, url) as opened:
        yield opened


def choose(page: Page, *class_ids: int) -> None:
    """Type the first letters of each class, and take what is found."""
    for class_id in class_ids:
        page.locator("#class-input").fill(NAMES[class_id][:12])
        page.locator("#class-input").press("Enter")
        expect(page.locator("#chips")).to_contain_text(NAMES[class_id])


def give(page: Page, *contents: bytes) -> None:
    """Choose files, as the browser's own dialogue does."""
    files = [file(f"{place}.png", content) for place, content in enumerate(contents)]
    page.locator("#choose input").set_input_files(files)


def shown(page: Page) -> list[list[tuple[int, float, str]]]:
    """Of each card its verdicts: class id, exact score, the word."""
    return [
        [
            (
                int(row.get_attribute("data-class-id") or -1),
                float(row.locator(".score").get_attribute("value") or "nan"),
                row.locator(".badge").inner_text().split()[-1],
            )
            for row in card.locator(".verdict").all()
        ]
        for card in page.locator(".card").all()
    ]


def answered(url: str, contents: list[bytes] | list[str], **question: object) -> list:
    """The same as `shown`, by the API."""
    inputs: dict[str, object] = {"texts": contents}
    if isinstance(contents[0], bytes):
        inputs = {"images": [base64.b64encode(one).decode() for one in contents]}
    words = {True: "Yes", False: "No", None: "verdict"}
    results = []
    for place in range(len(contents)):
        one = {name: [values[place]] for name, values in inputs.items()}
        answer = httpx.post(f"{url}/v1/query", json={**question, **one}).json()
        verdicts = answer["results"][0]["verdicts"]
        results.append([(v["class_id"], v["score"], words[v["match"]]) for v in verdicts])
    return results


def assert_same(found: list, wanted: list) -> None:
    """Words and classes are equal, scores as nearly as batches of different sizes give them."""
    flat = [[verdict for card in cards for verdict in card] for cards in (found, wanted)]
    assert [len(card) for card in found] == [len(card) for card in wanted]
    assert [one[::2] for one in flat[0]] == [one[::2] for one in flat[1]]
    theirs, ours = ([score for _, score, _ in one] for one in flat)
    assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-5)


def fits(page: Page) -> bool:
    """Whether nothing makes the page wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


# -- asking ------------------------------------------------------------------------------------


def test_by_keyboard_alone_a_class_is_found_a_picture_chosen_and_the_apis_verdict_read(
    page: Page, url: str
) -> None:
    contents = [picture(seed) for seed in range(7)]  # more than two requests may hold
    files = [file(f"{place}.png", content) for place, content in enumerate(contents)]
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
    wanted = answered(url, contents, classes=[0, 6], recall=0.9)
    assert_same(shown(page), wanted)
    words = {word for card in wanted for _, _, word in card}
    assert words == {"Yes", "No"}
    yes = sum(card[1][2] == "Yes" for card in wanted)
    expect(page.locator("#summary")).to_contain_text(f"{NAMES[6]}: yes for {yes} of 7")
    assert page.locator("#cards .source").first.inner_text().startswith("threshold 0.00, the class")


def test_the_combobox_follows_the_arrows_and_escape_and_backspace(page: Page) -> None:
    field = page.get_by_role("combobox")
    page.keyboard.type("s")
    expect(field).to_have_attribute("aria-expanded", "true")
    options = page.get_by_role("option")
    assert options.count() > 2
    for key, place in (("ArrowDown", 1), ("ArrowDown", 2), ("ArrowUp", 1)):
        page.keyboard.press(key)
        active = field.get_attribute("aria-activedescendant")
        expect(options.nth(place)).to_have_id(active or "")
        expect(options.nth(place)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Escape")
    expect(field).to_have_attribute("aria-expanded", "false")
    assert field.get_attribute("aria-activedescendant") is None
    assert field.input_value() == "s"
    page.keyboard.press("Escape")
    assert field.input_value() == ""
    page.keyboard.type("zzz")
    expect(page.locator("#class-more")).to_have_text("No class has “zzz” in its name.")
    page.keyboard.press("Enter")
    expect(page.locator(".chip")).to_have_count(0)
    field.fill("")
    choose(page, 3)
    page.keyboard.press("Backspace")
    expect(page.locator(".chip")).to_have_count(0)


def test_pictures_that_are_dropped_or_pasted_are_asked_about(page: Page, url: str) -> None:
    choose(page, 0)
    for event, seed in (("drop", 1), ("paste", 2)):
        page.evaluate(
            """([event, content]) => {
                const bytes = Uint8Array.from(atob(content), (one) => one.charCodeAt(0));
                const data = new DataTransfer();
                data.items.add(new File([bytes], "a.png", { type: "image/png" }));
                const options = { bubbles: true, cancelable: true };
                document.body.dispatchEvent(event === "drop"
                    ? new DragEvent("drop", { ...options, dataTransfer: data })
                    : new ClipboardEvent("paste", { ...options, clipboardData: data }));
            }""",
            [event, base64.b64encode(picture(seed)).decode()],
        )
    expect(page.locator(".verdict")).to_have_count(2)
    assert_same(shown(page), answered(url, [picture(1), picture(2)], classes=[0], recall=0.9))
    drawn = "[...document.querySelectorAll('.card img')].map((one) => one.naturalWidth)"
    until(page, f"({drawn}).every(Boolean)")
    assert page.evaluate(drawn) == [30, 30]


def test_a_broken_picture_is_refused_where_it_stands_and_the_others_are_answered(
    page: Page, url: str
) -> None:
    good = [picture(seed) for seed in range(4)]
    give(page, good[0], b"no picture", good[1], b"", *good[2:])
    expect(page.locator("#summary")).to_contain_text("choose a class")
    choose(page, 0)
    expect(page.locator(".verdict")).to_have_count(4)
    problems = page.locator(".card:nth-child(2) .problem, .card:nth-child(4) .problem")
    expect(problems).to_have_count(2)
    expect(page.locator(".problem")).to_have_count(2)
    assert "images[" not in problems.first.inner_text()
    found = [card for card in shown(page) if card]
    assert_same(found, answered(url, good, classes=[0], recall=0.9))
    expect(page.locator("#summary")).to_contain_text("2 not answered")
    page.locator(".card:nth-child(2) .remove").click()
    expect(page.locator(".card")).to_have_count(5)
    page.locator("#clear").click()
    expect(page.locator("#answers")).to_be_hidden()


def test_what_decides_may_be_a_score_another_recall_or_nothing(page: Page, url: str) -> None:
    contents = [picture(0)]  # alone in its batch: not a bit of its score changes
    choose(page, 0, 6)
    give(page, *contents)
    expect(page.locator(".verdict")).to_have_count(2)
    expect(page.locator(".source").nth(1)).to_contain_text("pooled over all classes")
    wanted = answered(url, contents, classes=[0, 6])
    bar = wanted[0][0][1]  # exactly the first score: it is reached
    page.get_by_label("Score that decides").fill(repr(bar))
    expect(page.locator(".source").first).to_contain_text("your own")
    assert_same(shown(page), answered(url, contents, classes=[0, 6], threshold=bar))
    assert shown(page)[0][0][2] == "Yes"
    page.get_by_label("recall 99 %").check()
    expect(page.locator(".source").nth(1)).to_contain_text("no threshold")
    assert_same(shown(page), answered(url, contents, classes=[0, 6], recall=0.99))
    page.get_by_label("nothing: show scores").check()
    expect(page.locator(".badge")).to_have_count(0)
    expect(page.locator(".score")).to_have_count(2)
    scores = [float(one.get_attribute("value") or 0) for one in page.locator(".score").all()]
    assert scores == [score for card in wanted for _, score, _ in card]


def test_the_dot_and_the_bar_stand_where_the_numbers_are(page: Page) -> None:
    choose(page, 0)
    give(page, *(picture(seed) for seed in range(5)))
    expect(page.locator(".verdict")).to_have_count(5)
    page.emulate_media(reduced_motion="reduce")
    places = page.evaluate(
        """[...document.querySelectorAll(".verdict")].map((row) => {
            const middle = (one) => {
                const box = row.querySelector(one).getBoundingClientRect();
                const line = row.querySelector(".line").getBoundingClientRect();
                return (box.left + box.right) / 2 - line.left;
            };
            return [row.querySelector(".score").value, middle(".dot"), middle(".threshold")];
        })"""
    )
    scores, dots, bars = (np.array([float(one[part]) for one in places]) for part in range(3))
    slope, zero = np.polyfit(scores, dots, 1)
    assert slope > 0
    np.testing.assert_allclose(dots, slope * scores + zero, atol=0.3)
    np.testing.assert_allclose(bars, zero, atol=0.3)  # the threshold of class 0 is 0


def test_a_class_that_was_asked_before_costs_no_request(page: Page) -> None:
    choose(page, 0)
    give(page, picture(0))
    expect(page.locator(".verdict")).to_have_count(1)
    choose(page, 3)
    expect(page.locator(".verdict")).to_have_count(2)
    queries: list[str] = []
    page.on(
        "request", lambda request: queries.append(request.url) if "query" in request.url else None
    )
    page.get_by_label(f"Remove {NAMES[3]}").click()
    expect(page.locator(".verdict")).to_have_count(1)
    choose(page, 3)
    expect(page.locator(".verdict")).to_have_count(2)
    assert queries == []


def test_texts_are_asked_one_a_line_and_fed_to_a_watch(browser: Browser, tmp_path: Path) -> None:
    texts = ["a cat", "hund <b>& 猫</b> 🐶", "a dog", "and a cat", "x" * 301]
    api = application(write_of_texts(tmp_path / "texts"), max_inputs=2, max_text_chars=300)
    with listening(api) as url, visit(browser, url) as page:
        expect(page.locator("#tab-gallery")).to_be_hidden()
        page.keyboard.type("samo")
        page.keyboard.press("Enter")
        page.locator("#text-input").fill("\n\n".join(texts) + "\n")
        page.locator("#text-input").press("Control+Enter")
        expect(page.locator(".verdict")).to_have_count(4)
        assert_same(shown(page)[:4], answered(url, texts[:4], classes=[2], recall=0.9))
        assert page.locator(".card .text").all_inner_texts() == texts
        expect(page.locator(".card:nth-child(5) .problem")).to_contain_text(
            "has 301 characters, and the server takes 300"
        )
        page.get_by_label("Score that decides").fill("-1000")
        page.get_by_role("tab", name="Live watch").click()
        page.get_by_role("button", name="Watch for these classes").click()
        expect(page.locator(".watch").get_by_role("status")).to_have_text("listening")
        page.get_by_label("Text", exact=True).fill(texts[1])
        page.get_by_label("Text", exact=True).press("Enter")
        expect(page.locator(".heard .text")).to_have_text(texts[1])


# -- names, looks, widths ----------------------------------------------------------------------


def test_names_of_classes_and_files_are_text_and_never_html(page: Page) -> None:
    page.locator("#class-input").click()
    expect(page.get_by_role("option")).to_have_count(len(NAMES))
    assert page.locator("[role=option] .found").all_inner_texts() == list(NAMES)
    choose(page, 1, 2, 5)
    files = [file("<img src=x onerror=alert(1)>.png", picture(0)), file('"><b>.png', b"broken")]
    page.locator("#choose input").set_input_files(files)  # type: ignore[arg-type]
    expect(page.locator(".verdict")).to_have_count(3)
    assert page.locator(".class-name").all_inner_texts() == [NAMES[1], NAMES[2], NAMES[5]]
    assert page.locator(".file").all_inner_texts() == [one["name"] for one in files]
    assert page.evaluate("window.broken") is None
    assert page.locator("main b, main script, img[src=x]").count() == 0
    page.locator("#tab-gallery").click()
    expect(page.locator(".ranking h2")).to_have_text([NAMES[1], NAMES[2], NAMES[5]])


def test_at_360_pixels_nothing_is_wider_than_the_window(browser: Browser, url: str) -> None:
    with visit(browser, url, viewport={"width": 360, "height": 720}, has_touch=True) as page:
        assert fits(page)
        page.locator("#class-input").click()
        expect(page.get_by_role("option")).to_have_count(len(NAMES))
        assert fits(page)
        choose(page, 4, 0, 2)
        page.locator("#choose input").set_input_files(
            [file("w" * 90 + ".png", picture(0)), file("b.png", b"broken")]  # type: ignore[list-item]
        )
        expect(page.locator(".verdict")).to_have_count(3)
        assert fits(page)
        page.locator("#tab-gallery").click()
        expect(page.locator(".ranking")).to_have_count(3)
        page.locator(".ranking .button:visible").first.click()
        expect(page.locator(".hit").first).to_be_visible()
        assert fits(page)
        page.locator("#tab-watch").click()
        expect(page.locator("#room-watch")).to_be_visible()
        assert fits(page)


_CONTRASTS = """
() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => {
        const [r, g, b] = parts(colour).slice(0, 3).map((one) => {
            const c = one / 255;
            return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const behind = (one) => {
        for (; one; one = one.parentElement) {
            const colour = getComputedStyle(one).backgroundColor;
            if ((parts(colour)[3] ?? 1) === 1) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const found = {};
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const holder = walker.currentNode.parentElement;
        const text = walker.currentNode.data.trim();
        if (!text || !holder.checkVisibility({ visibilityProperty: true })) continue;
        const pair = [light(getComputedStyle(holder).color), light(behind(holder))];
        found[text.slice(0, 40)] = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    }
    return found;
}
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_of_aa_in_light_and_dark(
    browser: Browser, url: str, scheme: str
) -> None:
    with visit(browser, url, color_scheme=scheme) as page:
        choose(page, 0, 6)
        give(page, *(picture(seed) for seed in range(6)), b"broken")
        expect(page.locator(".verdict")).to_have_count(12)
        expect(page.locator(".badge.yes").first).to_be_visible()
        expect(page.locator(".badge.no").first).to_be_visible()
        page.locator("#class-input").click()
        expect(page.get_by_role("option").first).to_be_visible()
        contrasts = page.evaluate(_CONTRASTS)
        assert len(contrasts) > 20
        assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == (scheme == "dark")


# -- tokens, limits, notices -------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded_url(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = tmp_path_factory.mktemp("secrets") / "tokens"
    descriptor = os.open(tokens, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, f"{TOKEN}\n".encode())
    os.close(descriptor)
    with listening(application(bundle, token_file=str(tokens))) as address:
        yield address


def test_a_server_with_tokens_asks_for_one_and_then_works(
    browser: Browser, guarded_url: str
) -> None:
    assert httpx.get(f"{guarded_url}/v1/model").status_code == 401
    with visit(browser, guarded_url, is_started=False) as page:
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
        page.keyboard.type("a-wrong-one-0123456789-0123456789")
        page.keyboard.press("Enter")
        expect(page.locator("#token-reason")).to_contain_text("does not know the last one")
        expect(dialog).to_be_visible()
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        expect(page.locator("#rooms")).to_be_visible()
        choose(page, 0)
        give(page, picture(0))
        expect(page.locator(".verdict")).to_have_count(1)
        kept = page.evaluate(
            "[localStorage.length, document.cookie, Object.values(sessionStorage)]"
        )
        assert kept == [0, "", [TOKEN]]
        assert TOKEN not in page.content()
        page.reload()
        expect(page.locator("#rooms")).to_be_visible()
    with visit(browser, guarded_url, is_started=False) as page:
        expect(page.get_by_role("dialog")).to_be_visible()


def test_a_busy_server_is_waited_for_in_words_and_then_answers(
    browser: Browser, bundle: Path
) -> None:
    with listening(application(bundle, max_requests=1)) as url, visit(browser, url) as page:
        choose(page, 0)
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as slow:
            head = "POST /v1/query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            give(page, picture(0))
            expect(page.locator("#waiting")).to_contain_text("The server is busy")
            expect(page.locator(".verdict")).to_have_count(0)
        expect(page.locator(".verdict")).to_have_count(1)
        expect(page.locator("#waiting")).to_be_hidden()
        assert_same(shown(page), answered(url, [picture(0)], classes=[0], recall=0.9))


def test_a_server_that_is_gone_is_told_of_at_the_input_which_can_be_asked_again(
    browser: Browser, bundle: Path
) -> None:
    api = application(bundle)
    with listening(api) as url, visit(browser, url) as page:
        choose(page, 0)
        page.context.set_offline(True)
        page.clock.install()
        give(page, picture(0))
        expect(page.locator("#waiting")).to_contain_text("cannot be reached")
        for _ in range(4):
            page.clock.run_for(5000)
        expect(page.locator(".problem")).to_contain_text("the server cannot be reached")
        page.context.set_offline(False)
        page.get_by_role("button", name="Try again").click()
        expect(page.locator(".verdict")).to_have_count(1)


def test_a_loss_that_is_not_aligned_is_told_of(
    browser: Browser, page: Page, tmp_path: Path
) -> None:
    expect(page.locator("#notice")).to_be_hidden()
    changes = {"loss": {"kind": "ce", "aligned": False}}
    bundle = write(tmp_path / "pets", changes=changes)
    with listening(application(bundle)) as url, visit(browser, url) as other:
        expect(other.locator("#notice")).to_contain_text("trained with ce, which is not aligned")


# -- a gallery ---------------------------------------------------------------------------------


def test_a_gallery_shows_the_apis_hits_page_by_page_and_where_yes_ends(
    page: Page, url: str
) -> None:
    search = f"{url}/v1/galleries/all/search"
    wanted = httpx.post(search, json={"classes": [0], "limit": 1000}).json()["results"][0]["hits"]
    matches = 30  # two pages of hits, and then some below
    bar = wanted[matches - 1]["score"]
    assert bar > wanted[matches]["score"]
    choose(page, 0)
    page.get_by_label("Score that decides").fill(repr(bar))
    page.get_by_role("tab", name="Ask").press("ArrowRight")
    hits = page.locator(".hit")
    expect(hits).to_have_count(24)
    more = page.locator(".ranking .button")
    expect(page.locator(".ranking [role=status]")).to_contain_text(
        f"{matches} of {NUM_ITEMS} pictures reach the threshold"
    )
    more.press("Enter")
    expect(hits).to_have_count(matches)
    assert page.locator(".hit.no, .boundary").count() == 0
    expect(more).to_have_text("Show what comes below")
    more.press("Enter")
    expect(hits).to_have_count(NUM_ITEMS)
    expect(more).to_be_hidden()
    scores = [float(one.get_attribute("value") or 0) for one in hits.locator(".score").all()]
    assert scores == [hit["score"] for hit in wanted]
    assert hits.locator(".file").all_inner_texts() == [hit["name"] for hit in wanted]
    kinds = page.evaluate("[...document.querySelectorAll('.hits li')].map((one) => one.className)")
    assert kinds == ["hit yes"] * matches + ["boundary"] + ["hit no"] * (NUM_ITEMS - matches)
    until(page, "document.querySelectorAll('.hit img').length === 40")


# -- a live watch ------------------------------------------------------------------------------


def test_a_watch_is_made_fed_with_pictures_heard_from_elsewhere_and_deleted(
    page: Page, url: str
) -> None:
    contents = [picture(seed) for seed in range(7)]
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
    expect(page.locator("#room-watch")).to_contain_text("7 <b>.png: not a picture")
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


# -- how it is served --------------------------------------------------------------------------


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url) as opened:
        yield opened


def test_every_file_of_the_page_is_served_with_its_kind_and_a_strict_policy(
    client: httpx.Client,
) -> None:
    kinds = {
        "/": "text/html",
        ".css": "text/css",
        ".js": "text/javascript",
        ".svg": "image/svg+xml",
    }
    assert len(PAGE_PATHS) > 10
    for path in PAGE_PATHS:
        answer = client.get(path)
        kind = kinds[path if path == "/" else path[path.rindex(".") :]]
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache"
        for known in (answer.headers["etag"], f'"x", W/{answer.headers["etag"]}'):
            again = client.get(path, headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["content-security-policy"] == policy
        assert client.head(path).status_code == 200
    for path in (
        "/page/",
        "/page/..%2fapp.py",
        "/page/%2e%2e/page.py",
        "/page/x",
    ):
        assert client.get(path).status_code == 404


def test_the_files_name_nothing_from_elsewhere_and_are_no_part_of_the_api(
    client: httpx.Client,
) -> None:
    for path in PAGE_PATHS:
        text = client.get(path).text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?://|@import|innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text
        )
    assert not set(PAGE_PATHS) & set(client.get("/openapi.json").json()["paths"])
