"""What several rooms share: small shards, made once a session; `kway` in this process; and one
thread a test."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from threadpoolctl import threadpool_limits
from xdist.scheduler import LoadFileScheduling

import data.retry
from launch.main import main
from tests.faults.sitecustomize import inject
from tests.shards import glyph_shards, picture_shards, text_shards

# Tests run side by side, some with ranks of their own: more threads stand in each other's way.
torch.set_num_threads(1)
threadpool_limits(1)


# Each of these folders is run by one worker: its files share servers or a browser.
_FOLDERS_OF_ONE_WORKER = ("tests/serving/live/", "tests/serving/page/")


class LoadFileOrFolder(LoadFileScheduling):
    """`--dist loadfile`, by folder where files share what is expensive to start."""

    def _split_scope(self, nodeid: str) -> str:  # what xdist's own schedulers override
        shared = (folder for folder in _FOLDERS_OF_ONE_WORKER if nodeid.startswith(folder))
        return next(shared, super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return LoadFileOrFolder(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 5 classes of pictures in colour, without label vectors."""
    return picture_shards(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 13 characters, with label vectors."""
    return glyph_shards(tmp_path_factory.mktemp("glyphs"))


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `shards` of texts of 4 classes, and a `tokenizer` for them."""
    return text_shards(tmp_path_factory.mktemp("texts"))


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`inject` for the length of a test."""
    monkeypatch.setattr(data.retry, "_LONGEST_SECONDS", 0.01)

    def put(call: str, path: str, fail: Callable[[], None], times: int = 1_000_000) -> None:
        inject(call, path, fail, times=times, put=monkeypatch.setattr)

    return put


@pytest.fixture
def kway(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `kway ARGUMENTS…` in this process, which costs no imports; returns its exit code."""
    threads = torch.get_num_threads()

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["kway", *map(str, arguments)])
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            torch.set_num_threads(threads)
        return int(ended.value.code or 0)

    return run
