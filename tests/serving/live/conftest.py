"""The servers that the files in this folder share, on each runner. `tests/conftest.py` assigns the
folder to one worker. A server takes five to ten seconds to start on two idle cores.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.dispositions import ignored
from tests.serving.in_process import write_tokens
from tests.serving.live import servers
from tests.serving.live.servers import TOKEN
from tests.serving.started import Server, SharedServer, start
from tests.tiny_bundle import write

_LONGEST_NAME = "others".ljust(251, "-")


@pytest.fixture(scope="package", params=["no-ray", "ray"])
def runner(request: pytest.FixtureRequest) -> str:
    """What runs the application: this fixture repeats a test for each."""
    return request.param


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
    runner: str, bundle: Path, tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """REST and gRPC, with tokens and small limits."""

    def launch() -> Server:
        folder = tmp_path_factory.mktemp("server")
        for name in ("data", "serving"):  # they must not shadow kway's packages
            (folder / name).mkdir()
            (folder / name / "__init__.py").write_text("raise ImportError('not the package')")
        with ignored(signal.SIGINT):  # as if it were in the background of a script
            return start(
                bundle,
                folder / "stderr",
                *("--no-ray",) if runner == "no-ray" else ("--replicas", servers.REPLICAS),
                *("--grpc-port", 0, "--token-file", tokens, "--timeout", servers.TIMEOUT),
                *("--max-requests", servers.MAX_REQUESTS, "--max-inputs", servers.MAX_INPUTS),
                *("--max-body-mib", servers.MAX_BODY / 2**20, "--batch-wait", servers.BATCH_WAIT),
                start=[sys.executable, "-P", "-m", "launch"],
                cwd=folder,
            )

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
    runner: str, temporary_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """No tokens, only HTTP, and the longest name of a bundle folder."""
    bundle = write(tmp_path_factory.mktemp("bundles") / "others")
    bundle = bundle.rename(bundle.with_name(_LONGEST_NAME))

    def launch() -> Server:
        errors = tmp_path_factory.mktemp("server") / "stderr"
        options = ("--no-ray",) if runner == "no-ray" else ()
        return start(bundle, errors, *options, temporary=temporary_folder)

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
