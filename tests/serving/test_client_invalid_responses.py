"""How the client handles invalid and unexpected responses."""

import json
from collections.abc import Callable

import pytest

from serving.client import Client, RejectedError
from tests.serving.canned import answering


def http_response(body: bytes, status: str = "200 OK", head: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"HTTP/1.1 " + status.encode() + b"\r\n" + head + length + body


def test_html_instead_of_json_is_not_retried() -> None:
    with (
        answering(http_response(b"<html>hi</html>")) as (url, heads),
        Client(url) as client,
        pytest.raises(RejectedError, match="is it a kway server"),
    ):
        client.served()
    assert len(heads) == 1


def calls() -> list[Callable[[Client], object]]:
    return [
        lambda client: client.served(),
        lambda client: next(client.search("a", "b")),
        lambda client: client.classes("a"),
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (http_response(b"hello", head=b"Content-Encoding: gzip\r\n"), OSError),
        (http_response(b"[" * 200_000, "400 Bad Request"), RejectedError),
        (http_response(b"9" * 10_000, "400 Bad Request"), RejectedError),
        (http_response(b'{"error":"no"}', "400 Bad Request"), RejectedError),
        (http_response(b"null", "400 Bad Request"), RejectedError),
        (http_response(b"", "429 Busy", b"Retry-After: " + b"9" * 5000 + b"\r\n"), OSError),
        (b"garbage\r\n\r\n", OSError),
        (http_response(b"", "307 Elsewhere", b"Location: http://127.0.0.1:1/\r\n"), RejectedError),
    ],
)
def test_any_invalid_response_raises_oserror_or_rejected_error(
    answer: bytes, error: type[Exception]
) -> None:
    for call in calls():
        with (
            answering(answer) as (url, _),
            Client(url, retry_seconds=0) as client,
            pytest.raises((OSError, RejectedError)) as found,
        ):
            call(client)
        assert issubclass(found.type, OSError | RejectedError)
        if b"200 OK" not in answer and b"429" not in answer:
            assert issubclass(found.type, error)


def test_a_gallery_that_changes_between_two_pages_raises_an_error() -> None:
    def page(total: int) -> bytes:
        verdict = {"class": "a", "class_id": 0, "threshold": None, "threshold_source": None}
        hit = {**verdict, "score": 1.0, "match": None, "item": 0, "name": "1", "text": None}
        results = [{**verdict, "total": total, "matches": None, "hits": [hit]}]
        hits = {"aligned": True, "notice": None, "num_items": total, "results": results}
        return http_response(json.dumps(hits).encode(), head=b"Connection: close\r\n")

    with answering(page(3), page(4)) as (url, _), Client(url) as client:
        hits = client.search("pets", "a", page_size=1)
        assert next(hits).item == 0
        with pytest.raises(OSError, match=r"gallery pets .* changed during the search"):
            next(hits)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_names_that_would_change_the_path_are_rejected(name: str) -> None:
    with (
        answering(http_response(b"{}")) as (url, heads),
        Client(url) as client,
        pytest.raises(ValueError, match="is not a valid name or id for /v1/"),
    ):
        client.search_page(name, ["a"])
    assert heads == []
