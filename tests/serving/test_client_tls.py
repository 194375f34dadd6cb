"""The client with a TLS server whose certificate is trusted through an environment variable."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.client import Client
from tests.certificate import certificate
from tests.serving import in_process
from tests.serving.in_process import application
from tests.tiny_bundle import write_of_texts

TEXTS = ["a cat", "a dog", "hund"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL and the certificate file."""
    folder = tmp_path_factory.mktemp("tls")
    public, private = certificate(folder)
    api = application(write_of_texts(folder / "texts"))
    with in_process.listening(api, ssl_certfile=public, ssl_keyfile=private) as url:
        yield url.replace("http://", "https://"), public


def test_queries_work_over_tls(served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, public = served
    monkeypatch.setenv("SSL_CERT_FILE", str(public))
    with Client(url) as client:
        assert len(client.query(["husky"], TEXTS).results) == len(TEXTS)


def test_an_untrusted_certificate_fails_immediately(served: tuple[str, Path]) -> None:
    url, _ = served
    with Client(url) as client, pytest.raises(OSError, match="certificate verify failed"):
        client.served()
