"""What tests of the page at `/` share: its classes, images, and what a person does and reads."""

import base64

import cv2
import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

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
NUM_ITEMS = 40  # of the gallery


def image(seed: int) -> bytes:
    """A PNG that no other seed gives."""
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


def file(name: str, content: bytes) -> dict[str, object]:
    return {"name": name, "mimeType": "image/png", "buffer": content}


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
