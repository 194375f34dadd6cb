"""A real Chromium and the servers of the page, for all files of this folder; `tests/conftest.py`
gives the folder to one worker.

The application is the real one in this process; only Ray is not there. Package scope: while the
browser is open, `asyncio.run` fails in this thread.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page
from typer import Typer
from typer.testing import CliRunner

from launch.commands import index
from tests.serving.at_the_page import NAMES, NUM_ITEMS, TOKEN, image
from tests.serving.browsing import chromium, visit
from tests.serving.in_process import application, listening
from tests.tiny_bundle import write
from trainer.bundle.spec import ClassEntry


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="package")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [ClassEntry(name=name, attributes={"kind": "<b>pet</b>"}) for name in NAMES]
    return write(tmp_path_factory.mktemp("bundles") / "pets", entries=entries)


@pytest.fixture(scope="package")
def gallery(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, path = (tmp_path_factory.mktemp(name) for name in ("collection", "galleries"))
    for place in range(NUM_ITEMS):
        (folder / f"{place} <i>.png").write_bytes(image(place))
    app = Typer()
    app.command()(index.index)
    made = CliRunner().invoke(app, [str(bundle), str(folder), "-o", str(path / "all")])
    assert made.exit_code == 0, made.exception
    return path / "all"


@pytest.fixture(scope="package")
def url(bundle: Path, gallery: Path) -> Iterator[str]:
    with listening(application(bundle, max_inputs=3, galleries={"all": str(gallery)})) as address:
        yield address


@pytest.fixture(scope="package")
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
