"""Fixtures shared by all files in this folder: Chromium and the servers. `tests/conftest.py`
assigns the folder to one worker.

The real application runs in this process, without Ray. The fixtures have package scope, because
`asyncio.run` fails in this thread while the browser is open.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from data.classes.class_list import ClassInfo
from tests.noise_images import image
from tests.serving import started
from tests.serving.browsing import chromium, visit
from tests.serving.in_process import application, listening, write_tokens
from tests.serving.page_driver import NAMES, NUM_ITEMS, TOKEN
from tests.tiny_bundle import write


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="package")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [ClassInfo(name=name, attributes={"kind": "<b>pet</b>"}) for name in NAMES]
    return write(tmp_path_factory.mktemp("bundles") / "pets", entries=entries)


@pytest.fixture(scope="package")
def gallery(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, path = (tmp_path_factory.mktemp(name) for name in ("collection", "galleries"))
    for index in range(NUM_ITEMS):
        (folder / f"{index} <i>.png").write_bytes(image(index))
    started.index_gallery(bundle, folder, "-o", path / "all")
    return path / "all"


@pytest.fixture(scope="package")
def url(bundle: Path, gallery: Path) -> Iterator[str]:
    with listening(application(bundle, max_inputs=3, galleries={"all": str(gallery)})) as address:
        yield address


@pytest.fixture(scope="package")
def guarded_url(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tokens = tmp_path_factory.mktemp("secrets") / "tokens"
    write_tokens(tokens, TOKEN)
    with listening(application(bundle, token_file=str(tokens))) as address:
        yield address


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with visit(browser, url) as opened:
        yield opened
