"""The two servers that the files in this folder share. `tests/conftest.py` assigns the folder to
one worker. Each server takes about ten seconds to start on two cores.
"""

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from serving.galleries.building import IndexOptions, index_collection
from serving.galleries.collection import open_collection
from serving.galleries.features import LocalEncoder
from serving.model import Model
from tests.dispositions import ignored
from tests.serving.live.servers import TOKEN, start_guarded, start_open, write_tokens
from tests.serving.started import Server, SharedServer, write_images
from tests.tiny_bundle import write


@pytest.fixture(scope="package")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="package")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the guarded server."""
    return write(tmp_path_factory.mktemp("bundles") / "pets")


@pytest.fixture(scope="package")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The token file of the guarded server."""
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    write_tokens(path, TOKEN)
    return path


@pytest.fixture(scope="package")
def guarded_server(
    bundle: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    def launch() -> Server:
        with ignored(signal.SIGINT):  # as if it were in the background of a script
            return start_guarded(bundle, tokens, tmp_path_factory.mktemp("server"))

    with closing(SharedServer(launch)) as shared:
        yield shared


@pytest.fixture(scope="package")
def temporary_folder() -> Iterator[Path]:
    """The TMPDIR of the open server. Its path is short because Ray creates sockets in it, and
    socket paths are limited to 107 bytes.
    """
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="package")
def open_server(
    temporary_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    bundle = write(tmp_path_factory.mktemp("bundles") / "others")
    gallery = tmp_path_factory.mktemp("galleries") / "pets"
    images = write_images(tmp_path_factory.mktemp("images"))[0].parent
    index_collection(
        LocalEncoder(Model.open(bundle)),
        open_collection(images, "images"),
        gallery,
        IndexOptions(index=True),
    )

    def launch() -> Server:
        errors = tmp_path_factory.mktemp("server") / "stderr"
        return start_open(bundle, gallery, errors, temporary_folder)

    with closing(SharedServer(launch)) as shared:
        yield shared


@pytest.fixture
def server(guarded_server: SharedServer) -> Server:
    return guarded_server.get()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as opened:
        yield opened
