"""The client at servers that say what no kway server says, or not what was expected."""

import gzip
import json
from collections.abc import Callable

import pytest

from serving.client import Client, Ended, Hit, Listening, RefusedError
from tests.serving.canned import LINES, answering

LISTENING, ENDED = b'{"listening":"x"}\n', b'{"end":"expired"}\n'


def saying(body: bytes, status: str = "200 OK", head: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return b"HTTP/1.1 " + status.encode() + b"\r\n" + head + length + body


@pytest.mark.parametrize(
    "answer",
    [
        saying(b""),
        saying(b"<html>hi</html>"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{",
        LINES + b'{"frame":null,"error":{"code":"watches_down","message":"no"}}\n',
    ],
)
def test_a_listener_that_hears_nothing_gives_up(answer: bytes) -> None:
    with (
        answering(answer) as (url, heads),
        Client(url, patience=1) as client,
        pytest.raises(OSError, match="nothing was heard for 1 s"),
    ):
        next(client.listen("x"))
    assert len(heads) > 1


@pytest.mark.parametrize("code", ["listener_lost", "watches_down"])
def test_a_listener_that_the_server_lost_listens_again(code: str) -> None:
    lost = json.dumps({"frame": None, "error": {"code": code, "message": "no"}}).encode() + b"\n"
    with (
        answering(LINES + LISTENING + lost, LINES + LISTENING + ENDED) as (url, heads),
        Client(url, patience=0) as client,
    ):
        heard = list(client.listen("x"))
    again = Listening(listening="x")
    assert heard == [again, again, Ended(end="expired")]
    assert len(heads) == 2


def test_html_where_lines_are_expected_is_final() -> None:
    with answering(LINES + b"<html>\nhi</html>\n") as (url, heads), Client(url) as client:
        for answers in (client.listen("x"), client.stream(["a"], ["b"]), client.feed("a", ["b"])):
            with pytest.raises(RefusedError, match="is it a kway server"):
                next(answers)
    assert len(heads) == 3


def test_a_line_without_an_end_is_a_lost_connection() -> None:
    with (
        answering(LINES + b"a" * (17 * 2**20)) as (url, _),
        Client(url) as client,
        pytest.raises(ConnectionError, match="a line is longer than 16777216 bytes"),
    ):
        next(client.stream(["a"], ["b"]))


def test_lines_as_long_as_the_answers_to_a_hundred_classes_are_read() -> None:
    hit = json.dumps({"line": 0, "id": "a" * 200, "verdicts": [], "notice": "a" * 2**20}).encode()
    done = b'{"done":{"inputs":1,"hits":null,"errors":0}}\n'
    with answering(LINES + hit + b"\n" + done) as (url, _), Client(url) as client:
        assert [type(one).__name__ for one in client.stream(["a"], ["b"])] == ["Hit", "Done"]
        assert isinstance(next(client.stream(["a"], ["b"])), Hit)


def asks() -> list[Callable[[Client], object]]:
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
        (saying(b"hello", head=b"Content-Encoding: gzip\r\n"), OSError),
        (saying(b"[" * 200_000, "400 Bad Request"), RefusedError),
        (saying(b"9" * 10_000, "400 Bad Request"), RefusedError),
        (saying(b'{"error":"no"}', "400 Bad Request"), RefusedError),
        (saying(b"null", "400 Bad Request"), RefusedError),
        (saying(b"", "429 Busy", b"Retry-After: " + b"9" * 5000 + b"\r\n"), OSError),
        (b"garbage\r\n\r\n", OSError),
        (saying(b"", "307 Elsewhere", b"Location: http://127.0.0.1:1/\r\n"), RefusedError),
    ],
)
def test_whatever_a_server_says_the_error_is_one_of_two(
    answer: bytes, error: type[Exception]
) -> None:
    for ask in asks():
        with (
            answering(answer) as (url, _),
            Client(url, patience=0) as client,
            pytest.raises((OSError, RefusedError)) as found,
        ):
            ask(client)
        assert issubclass(found.type, OSError | RefusedError)
        if b"200 OK" not in answer and b"429" not in answer:
            assert issubclass(found.type, error)


def test_an_answer_of_endless_size_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.client.messages._MAX_ANSWER_BYTES", 10_000)
    small = gzip.compress(b" " * 10**6)
    with (
        answering(saying(small, head=b"Content-Encoding: gzip\r\n")) as (url, _),
        Client(url) as client,
        pytest.raises(RefusedError, match="is over 10000 bytes"),
    ):
        client.served()


def test_a_feed_asks_for_the_latest_frames_only_where_it_is_told_to() -> None:
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


def test_a_gallery_that_changes_between_two_pages_is_said() -> None:
    def page(total: int) -> bytes:
        verdict = {"class": "a", "class_id": 0, "threshold": None, "threshold_source": None}
        hit = {**verdict, "score": 1.0, "match": None, "item": 0, "name": "1", "text": None}
        results = [{**verdict, "total": total, "matches": None, "hits": [hit]}]
        whole = {"aligned": True, "notice": None, "num_items": total, "results": results}
        return saying(json.dumps(whole).encode(), head=b"Connection: close\r\n")

    with answering(page(3), page(4)) as (url, _), Client(url) as client:
        hits = client.search("pets", "a", page_size=1)
        assert next(hits).item == 0
        with pytest.raises(OSError, match=r"gallery pets .* has changed: search it again"):
            next(hits)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_would_make_another_path_is_refused(name: str) -> None:
    with answering(saying(b"{}")) as (url, heads), Client(url) as client:
        for ask in (
            lambda: client.delete_watch(name),
            lambda: client.renew_watch(name),
            lambda: next(client.listen(name)),
            lambda: client.feed(name, []),
            lambda: client.search_page(name, ["a"]),
        ):
            with pytest.raises(ValueError, match="names nothing of /v1/"):
                ask()
    assert heads == []
