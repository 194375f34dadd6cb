"""Bodies with a `Content-Encoding` are decompressed within limits, or rejected with the reason."""

import base64
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from fastapi import FastAPI

from tests.serving.in_process import application, ask, refusal
from tests.serving.page_driver import image
from tests.tiny_bundle import write

MAX_BODY = 100_000
JSON = "application/json"
IMAGE = base64.b64encode(image(0)).decode()
VALID = json.dumps({"classes": [2], "images": [IMAGE], "recall": 0.9}).encode()
IMAGE_QUERY = "/v1/query?classes=husky"
GZIPPED, DEFLATED = gzip.compress(VALID, mtime=0), zlib.compress(VALID)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    bundle = write(tmp_path_factory.mktemp("bundles") / "pets")
    return application(bundle, max_body_bytes=MAX_BODY)


def sent(api: FastAPI, path: str, body: bytes, encoding: str, kind: str = JSON) -> httpx.Response:
    """Send a body in 100-byte parts, without a Content-Length, and return the response."""

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    headers = {"content-type": kind, "content-encoding": encoding}
    return ask(api, "POST", path, content=parts(), headers=headers)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("gzip", GZIPPED), ("GZIP", GZIPPED), ("x-gzip", GZIPPED), ("deflate", DEFLATED)],
    ids=["gzip", "GZIP", "x-gzip", "deflate"],
)
def test_a_compressed_body_gets_the_same_answer_as_the_plain_one(
    api: FastAPI, encoding: str, body: bytes
) -> None:
    plain = sent(api, "/v1/query", VALID, "identity")
    assert plain.status_code == 200
    assert sent(api, "/v1/query", body, encoding).json() == plain.json()


def test_every_route_that_reads_a_complete_body_decompresses_it(api: FastAPI) -> None:
    body = gzip.compress(image(0))
    assert sent(api, IMAGE_QUERY, body, "gzip", "image/png").is_success
    fields, files = {"classes": "husky"}, {"images": image(0)}
    form = httpx.Request("POST", "http://kway", data=fields, files=files)
    kind = form.headers["content-type"]
    assert sent(api, "/v1/query", gzip.compress(form.read()), "gzip", kind).is_success
    inputs = [
        {"name": "images", "datatype": "BYTES", "shape": [1], "data": [IMAGE]},
        {"name": "class_ids", "datatype": "INT64", "shape": [1], "data": [2]},
    ]
    body = gzip.compress(json.dumps({"inputs": inputs}).encode())
    assert sent(api, "/v2/models/pets/infer", body, "gzip").is_success


@pytest.mark.parametrize(("path", "kind"), [("/v1/query", JSON), (IMAGE_QUERY, "image/png")])
@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
def test_a_body_is_not_decompressed_beyond_the_limit(
    api: FastAPI, path: str, kind: str, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    bomb = compress(bytes(300 * MAX_BODY))
    assert len(bomb) < MAX_BODY
    tracemalloc.start()
    try:
        answer = sent(api, path, bomb, encoding, kind)
        assert tracemalloc.get_traced_memory()[1] < 20 * MAX_BODY
    finally:
        tracemalloc.stop()
    assert refusal(answer) == (413, "body_too_large")


DAMAGED = {
    "not gzip": (VALID, "gzip"),
    "not deflate": (VALID, "deflate"),
    "empty": (b"", "gzip"),
    "one byte short": (GZIPPED[:-1], "gzip"),
    "truncated": (GZIPPED[:20], "gzip"),
    "wrong checksum": (GZIPPED[:-8] + bytes(8), "gzip"),
    "an additional byte": (GZIPPED + b"x", "gzip"),
    "twice": (2 * GZIPPED, "gzip"),
    "deflate declared as gzip": (DEFLATED, "gzip"),
    "gzip declared as deflate": (GZIPPED, "deflate"),
}


@pytest.mark.parametrize(("body", "encoding"), DAMAGED.values(), ids=DAMAGED)
def test_a_corrupted_body_is_rejected(api: FastAPI, body: bytes, encoding: str) -> None:
    assert refusal(sent(api, "/v1/query", body, encoding)) == (400, "invalid_compression")


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip;q=1", 5000 * "x"])
def test_an_unsupported_content_encoding_is_rejected(api: FastAPI, encoding: str) -> None:
    answer = sent(api, "/v1/query", VALID, encoding)
    assert refusal(answer) == (415, "unknown_encoding")
    assert "gzip or deflate" in answer.json()["error"]["message"]
    assert len(answer.text) < 500
