"""How the client handles invalid and unexpected responses."""

import gzip
import json
from collections.abc import Callable

import pytest

from serving.client import Client, Ended, Hit, Listening, RejectedError
from tests.serving.canned import LINES, answering

LISTENING, ENDED = b'{"listening":"x","cursor":0}\n', b'{"end":"expired"}\n'


def http_response(body: bytes, status: str = "200 OK", head: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"HTTP/1.1 " + status.encode() + b"\r\n" + head + length + body


@pytest.mark.parametrize(
    "answer",
    [
        http_response(b""),
        http_response(b"<html>hi</html>"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
        LINES + b'{"frame":null,"error":{"code":"watches_down","message":"no"}}\n',
    ],
)
def test_a_listener_without_events_fails_after_retry_seconds(answer: bytes) -> None:
    with (
        answering(answer) as (url, heads),
        Client(url, retry_seconds=1) as client,
        pytest.raises(OSError, match="no event for 1 s"),
    ):
        next(client.listen("x"))
    assert len(heads) > 1


@pytest.mark.parametrize("code", ["listener_lost", "watches_down"])
def test_a_listener_reconnects_if_the_server_has_lost_it(code: str) -> None:
    lost = json.dumps({"frame": None, "error": {"code": code, "message": "no"}}).encode() + b"\n"
    with (
        answering(LINES + LISTENING + lost, LINES + LISTENING + ENDED) as (url, heads),
        Client(url, retry_seconds=0) as client,
    ):
        events = list(client.listen("x"))
    listening = Listening(listening="x", cursor=0)
    assert events == [listening, listening, Ended(end="expired")]
    assert len(heads) == 2


def test_html_instead_of_events_is_not_retried() -> None:
    with answering(LINES + b"<html>\nhi</html>\n") as (url, heads), Client(url) as client:
        for answers in (client.listen("x"), client.stream(["a"], ["b"]), client.feed("a", ["b"])):
            with pytest.raises(RejectedError, match="is it a kway server"):
                next(answers)
    assert len(heads) == 3


def test_an_overlong_line_raises_connection_error() -> None:
    with (
        answering(LINES + b"a" * (17 * 2**20)) as (url, _),
        Client(url) as client,
        pytest.raises(ConnectionError, match="a line of more than 16777216 bytes"),
    ):
        next(client.stream(["a"], ["b"]))


def test_lines_of_one_megabyte_can_be_read() -> None:
    hit = json.dumps({"line": 0, "id": "a" * 200, "verdicts": [], "notice": "a" * 2**20}).encode()
    done = b'{"done":{"inputs":1,"hits":null,"errors":0}}\n'
    with answering(LINES + hit + b"\n" + done) as (url, _), Client(url) as client:
        assert [type(one).__name__ for one in client.stream(["a"], ["b"])] == ["Hit", "Done"]
        assert isinstance(next(client.stream(["a"], ["b"])), Hit)


def calls() -> list[Callable[[Client], object]]:
    return [
        lambda client: client.served(),
        lambda client: next(client.search("a", "b")),
        lambda client: client.create_watch(["a"], ttl_seconds=1, recall=0.9),
        lambda client: next(client.stream(["a"], ["b"])),
        lambda client: next(client.listen("x")),
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


def test_a_response_that_is_too_large_is_not_read_completely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serving.client.messages._MAX_RESPONSE_BYTES", 10_000)
    small = gzip.compress(b" " * 10**6)
    with (
        answering(http_response(small, head=b"Content-Encoding: gzip\r\n")) as (url, _),
        Client(url) as client,
        pytest.raises(RejectedError, match="larger than 10000 bytes"),
    ):
        client.served()


def test_feed_flags_become_url_parameters() -> None:
    done = b'{"done":{"frames":1,"hits":0,"errors":0,"dropped":0}}\n'
    with answering(LINES + done) as (url, heads), Client(url) as client:
        for flags in ({}, {"latest": True}, {"latest": True, "acknowledge": True}):
            list(client.feed("door", ["a"], **flags))
    targets = [head.split()[1] for head in heads]
    assert targets == [
        b"/v1/feeds/door",
        b"/v1/feeds/door?latest=true",
        b"/v1/feeds/door?latest=true&acknowledge=true",
    ]


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
    with answering(http_response(b"{}")) as (url, heads), Client(url) as client:
        for call in (
            lambda: client.delete_watch(name),
            lambda: client.renew_watch(name),
            lambda: next(client.listen(name)),
            lambda: client.feed(name, []),
            lambda: client.search_page(name, ["a"]),
        ):
            with pytest.raises(ValueError, match="is not a valid name or id for /v1/"):
                call()
    assert heads == []
