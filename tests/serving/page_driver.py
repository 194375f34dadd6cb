"""Test data and user actions for tests of the page at `/`."""

import base64

import httpx
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
NUM_ITEMS = 40  # in the gallery


def file(name: str, content: bytes) -> dict[str, object]:
    return {"name": name, "mimeType": "image/png", "buffer": content}


def choose_classes(page: Page, *class_ids: int) -> None:
    """Type the first letters of each class and select the first result."""
    for class_id in class_ids:
        page.locator("#class-input").fill(NAMES[class_id][:12])
        page.locator("#class-input").press("Enter")
        expect(page.locator("#chips")).to_contain_text(NAMES[class_id])


def add_images(page: Page, *contents: bytes) -> None:
    """Add images with the file chooser."""
    files = [file(f"{index}.png", content) for index, content in enumerate(contents)]
    page.locator("#choose input").set_input_files(files)


def shown_verdicts(page: Page) -> list[list[tuple[int, float, str]]]:
    """Return the verdicts of each card: (class id, exact score, last word of the badge)."""
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


def api_verdicts(url: str, contents: list[bytes] | list[str], **query: object) -> list:
    """Return the verdicts from the API in the format of `shown_verdicts`."""
    inputs: dict[str, object] = {"texts": contents}
    if isinstance(contents[0], bytes):
        inputs = {"images": [base64.b64encode(one).decode() for one in contents]}
    words = {True: "Yes", False: "No", None: "verdict"}
    results = []
    for index in range(len(contents)):
        one = {name: [values[index]] for name, values in inputs.items()}
        response = httpx.post(f"{url}/v1/query", json={**query, **one}).json()
        verdicts = response["results"][0]["verdicts"]
        results.append([(v["class_id"], v["score"], words[v["match"]]) for v in verdicts])
    return results


def assert_same_verdicts(actual: list, expected: list) -> None:
    """Assert that classes and badges are equal and that scores differ by no more than rounding."""
    flat = [[verdict for card in cards for verdict in card] for cards in (actual, expected)]
    assert [len(card) for card in actual] == [len(card) for card in expected]
    assert [one[::2] for one in flat[0]] == [one[::2] for one in flat[1]]
    actual_scores, expected_scores = ([score for _, score, _ in one] for one in flat)
    assert actual_scores == pytest.approx(expected_scores, rel=1e-5, abs=1e-5)
