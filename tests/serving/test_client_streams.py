"""Streams of the client against the real application on a free port."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from serving.client import Client, Done, Hit, Item, LineError, RejectedError
from tests.serving import in_process
from tests.serving.bad_images import encoded
from tests.serving.in_process import application
from tests.serving.relay import relayed
from tests.tiny_bundle import write, write_of_texts

TOKEN = "a" * 32
TEXTS = ["a cat", "a dog", "hund", "猫", "a dog and a cat"]
BODY = 20_000


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_of_texts(tmp_path_factory.mktemp("bundles") / "texts")


@pytest.fixture(scope="module")
def url(bundle: Path) -> Iterator[str]:
    api = application(bundle, max_streams=1, max_body_bytes=BODY, max_text_chars=10_000)
    with in_process.listening(api) as url:
        yield url


@pytest.fixture
def client(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    # By default, the client waits for 5 s while the only stream slot is in use.
    monkeypatch.setattr("serving.client.messages._LONGEST_WAIT_SECONDS", 0.2)
    with Client(url, retry_seconds=20) as client:
        yield client


def scores(client: Client, texts: list[str]) -> list[float]:
    return [one.verdicts[0].score for one in client.query(["husky"], texts).results]


def read(answers) -> tuple[list[Hit], Done]:
    *hits, done = answers
    assert all(isinstance(one, Hit) for one in hits)
    assert isinstance(done, Done)
    return hits, done


def test_a_stream_yields_the_same_scores_as_a_query_in_order(client: Client) -> None:
    hits, done = read(client.stream(["husky", 4], TEXTS))
    assert [hit.id for hit in hits] == [0, 1, 2, 3, 4]
    assert [hit.verdicts[0].score for hit in hits] == pytest.approx(scores(client, TEXTS))
    assert [hit.verdicts[1].class_name for hit in hits] == ["siamese cat"] * 5
    assert done.done.model_dump() == {"inputs": 5, "hits": None, "errors": 0}


def test_a_class_id_that_is_also_a_name_is_rejected_in_streams(client: Client) -> None:
    verdict = client.query([3], TEXTS[:1]).results[0].verdicts[0]
    assert (verdict.class_id, verdict.class_name) == (3, "tabby cat")
    # URL parameters are strings, and another class is named "#3".
    with pytest.raises(RejectedError, match="is both the name of class 5 and the ID"):
        next(client.stream([3], TEXTS))


@pytest.mark.parametrize("one", [None, bytearray(b"a"), ("a cat", "id")])
def test_invalid_inputs_raise_while_results_are_read(client: Client, one: Any) -> None:
    answers = client.stream(["husky"], ["a cat", one])
    with pytest.raises(TypeError, match="an input must be a Path, bytes or str"):
        list(answers)
    with pytest.raises(TypeError, match="frames is a single str"):
        client.feed("door", "a cat")
    with pytest.raises(TypeError, match="inputs is a single bytes"):
        client.stream(["husky"], b"a cat")
    with pytest.raises(TypeError, match="classes is a single str"):
        client.stream("husky", ["a cat"])


def test_a_stream_yields_only_matches_unless_all_is_set(client: Client) -> None:
    threshold = sorted(scores(client, TEXTS))[2]
    hits, done = read(client.stream(["husky"], TEXTS, threshold=threshold - 1e-6))
    assert len(hits) == done.done.hits == 3
    assert done.done.inputs == 5
    assert len(read(client.stream(["husky"], TEXTS, threshold=1e6, all=True))[0]) == 5


def test_results_arrive_before_the_next_input_is_available(client: Client) -> None:
    answered = threading.Event()

    def inputs() -> Iterator[str]:
        yield "a cat"
        assert answered.wait(60)
        yield "a dog"

    answers = client.stream(["husky"], inputs())
    first = next(answers)
    answered.set()
    assert [first.id, next(answers).id] == [0, 1]
    assert isinstance(next(answers), Done)


def test_results_have_the_ids_of_their_inputs_and_errors_are_returned_as_values(
    client: Client,
) -> None:
    sent = [Item("a cat", id="猫\u2028\n"), b"an image", Item("x" * BODY, id="long"), "a dog"]
    first, image, long, last, done = client.stream(["husky"], sent)
    assert (first.id, last.id) == ("猫\u2028\n", 3)
    assert isinstance(image, LineError)
    assert (image.id, image.error.code) == (1, "not_a_picture_model")
    assert (long.id, long.line, long.error.code) == (None, 2, "line_too_long")
    assert done.done.errors == 2


def test_images_may_be_paths_or_bytes(tmp_path: Path) -> None:
    image = encoded(Image.effect_noise((20, 30), 50), "PNG")
    (tmp_path / "1.png").write_bytes(image)
    api = application(write(tmp_path / "pets"))
    with in_process.listening(api) as url, Client(url) as client:
        hits, _ = read(client.stream(["husky"], [tmp_path / "1.png", image]))
        score = client.query(["husky"], [image]).results[0].verdicts[0].score
        assert [hit.verdicts[0].score for hit in hits] == pytest.approx([score] * 2)
        with pytest.raises(FileNotFoundError):
            list(client.stream(["husky"], [tmp_path / "none.png"]))


def test_exceptions_raised_by_the_inputs_are_raised_while_results_are_read(client: Client) -> None:
    def inputs() -> Iterator[str]:
        yield "a cat"
        raise RuntimeError("no more")

    answers = client.stream(["husky"], inputs())
    with pytest.raises(RuntimeError, match="no more"):
        list(answers)
    assert len(read(client.stream(["husky"], TEXTS))[0]) == 5  # the only stream slot is free again


@pytest.mark.parametrize(
    ("classes", "token", "status", "code"),
    [
        (["huskey"], TOKEN, 404, "unknown_class"),
        ([], TOKEN, 422, "invalid_query"),
        (["husky"], None, 401, "no_token"),
        (["husky"], "b" * 32, 401, "wrong_token"),
    ],
)
def test_a_rejected_stream_consumes_no_inputs(
    bundle: Path, tmp_path: Path, classes: list[str], token: str | None, status: int, code: str
) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text(TOKEN)
    inputs = iter(TEXTS)
    api = application(bundle, token_file=tokens)
    with (
        in_process.listening(api) as url,
        Client(url, token=token) as client,
        pytest.raises(RejectedError) as rejected,
    ):
        list(client.stream(classes, inputs))
    assert (rejected.value.status, rejected.value.code) == (status, code)
    assert list(inputs) == TEXTS


def test_streams_are_retried_while_the_server_is_full(url: str, client: Client) -> None:
    first = client.stream(["husky"], endless_texts())
    next(first)
    waiting = iter(TEXTS)
    with (
        Client(url, retry_seconds=0) as no_retries,
        pytest.raises(OSError, match="limit of 1 streams"),
    ):
        next(no_retries.stream(["husky"], waiting))
    results: list = []
    second = threading.Thread(target=lambda: results.extend(client.stream(["husky"], waiting)))
    second.start()
    time.sleep(0.5)
    assert not results
    first.close()
    second.join(60)
    assert len(results) == len(TEXTS) + 1


def test_closing_the_generator_frees_the_stream_and_its_thread(client: Client) -> None:
    released = threading.Event()

    def stuck() -> Iterator[str]:
        yield "a cat"
        released.wait(60)

    before = threading.active_count()
    for inputs in (endless_texts(), stuck()):
        answers = client.stream(["husky"], inputs)
        next(answers)
        answers.close()
        assert len(read(client.stream(["husky"], TEXTS))[0]) == 5
    released.set()
    until = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_lost_connection_raises_connection_error(url: str) -> None:
    with relayed(url) as relay, Client(relay.url, retry_seconds=0) as client:
        answers = client.stream(["husky"], endless_texts())
        assert isinstance(next(answers), Hit)
        relay.cut()
        with pytest.raises(ConnectionError, match="lost the connection"):
            list(answers)
        assert relay.connections == 1  # a stream that has begun is not retried


def endless_texts() -> Iterator[str]:
    while True:
        yield "a cat"


@pytest.mark.parametrize(
    "head",
    [b"Content-Type: application/x-ndjson\r\nConnection: close\r\n", b"Content-Length: 9\r\n"],
)
def test_a_stream_without_its_last_line_raises_connection_error(head: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                body = b'{"line":0,"id":0,"verdicts":[]}\n' if b"Length" not in head else b""
                connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body)
                connection.recv(65536)

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ConnectionError, match="lost the connection"):
            list(client.stream(["husky"], TEXTS))
        thread.join(60)


def test_a_stream_ended_by_the_server_raises_an_error_with_the_reason(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.client.transport._SILENCE_SECONDS", 20.0)
    api = application(bundle, stream_idle_seconds=0.3)
    released = threading.Event()

    def inputs() -> Iterator[str]:
        yield "a cat"
        released.wait(60)

    with in_process.listening(api) as url, Client(url) as client:
        answers = client.stream(["husky"], inputs())
        assert isinstance(next(answers), Hit)
        with pytest.raises(RejectedError) as rejected:
            next(answers)
    released.set()
    assert (rejected.value.status, rejected.value.code) == (200, "idle")


def test_slow_inputs_keep_the_stream_open(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.client.transport._SILENCE_SECONDS", 0.1)
    api = application(bundle, stream_idle_seconds=0.5)

    def inputs() -> Iterator[str]:
        for text in TEXTS[:2]:
            time.sleep(1.2)
            yield text

    with in_process.listening(api) as url, Client(url) as client:
        hits, _ = read(client.stream(["husky"], inputs()))
    assert [hit.id for hit in hits] == [0, 1]


def test_a_long_stream_uses_little_memory(url: str) -> None:
    image = bytes(1000)  # 6.7 MB in total; each is rejected, which is fast
    num_read = 0

    def inputs() -> Iterator[bytes]:
        nonlocal num_read
        for _ in range(5_000):
            num_read += 1
            yield image

    with Client(url, retry_seconds=20) as client:
        tracemalloc.start()
        answers = client.stream(["husky"], inputs())
        ids = [next(answers).id]
        time.sleep(0.5)
        num_ahead = num_read  # nothing more is consumed while no results are read
        ids += [one.id for one in answers if isinstance(one, LineError)]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert num_ahead < 100
    assert ids == list(range(5_000))
    assert peak < 4 * 2**20
