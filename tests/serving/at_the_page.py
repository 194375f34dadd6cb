"""What tests of the page at `/` share: its servers and a real Chromium, as fixtures, and what a
person does and reads there.

The application is the real one in this process; only Ray is not there.
"""

import base64
import os
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
from tests.serving.browsing import chromium, visit
from tests.serving.in_process import application, listening
from tests.tiny_bundle import write
from trainer.bundle.spec import ClassEntry

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


@pytest.fixture(scope="module")
def guarded_url(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = tmp_path_factory.mktemp("secrets") / "tokens"
    descriptor = os.open(tokens, os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, f"{TOKEN}\n".encode())
    os.close(descriptor)
    with listening(application(bundle, token_file=str(tokens))) as address:
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
