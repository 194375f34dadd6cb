"""Delivery of hits to webhooks: with real requests from a board or a server in this process."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest

from serving.config import ServingConfig
from serving.watches import webhook_request, webhooks
from serving.watches.board import Board
from serving.watches.storage import MemoryStorage
from serving.watches.watch import Terms, Watch
from serving.watches.webhook import Webhook, allowed_host
from tests.serving.receiver import KEY, SECRET, Message, Receiver, receiving
from tests.serving.watching import (
    Kway,
    alice,
    create_watch,
    eventually,
    frames,
    images,
    running,
    send_frames,
)

pytestmark = pytest.mark.slow

__all__ = ["alice", "images"]  # fixtures


@pytest.fixture(autouse=True)
def repeats_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are repeated quickly, and no request times out on a busy machine."""
    monkeypatch.setattr(webhook_request, "_SECONDS", 100)
    monkeypatch.setattr(webhooks, "_MIN_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(webhooks, "_MAX_RETRY_SECONDS", 0.1)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A receiver of this test only: an earlier test may have left requests in progress."""
    with receiving() as opened:
        yield opened
    assert opened.problems == []


@pytest.fixture(scope="module")
def listener() -> Iterator[Receiver]:
    with receiving() as opened:
        yield opened
    assert opened.problems == []


@pytest.fixture(scope="module")
def kway(tmp_path_factory: pytest.TempPathFactory, listener: Receiver) -> Iterator[Kway]:
    folder = tmp_path_factory.mktemp("webhooks")
    with running(folder, webhook_hosts=[listener.host]) as opened:
        yield opened


def terms(webhook: Webhook | None, **fields: Any) -> Terms:
    common = {"classes": ("husky",), "recall": None, "threshold": 0, "ttl_seconds": 1000}
    return Terms.model_validate({**common, "webhook": webhook, **fields})


async def publish(board: Board, watch: Watch, *ids: int) -> None:
    await board.publish([(watch.id, json.dumps({"id": one})) for one in ids], {})


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def on_board(
    receiver: Receiver,
    work: Callable[[Board], Coroutine[Any, Any, None]],
    storage: MemoryStorage | None = None,
    **limits: Any,
) -> None:
    """Run `work` with a board that allows the receiver."""

    async def run() -> None:
        config = ServingConfig(webhook_hosts=(receiver.host,), **limits)
        board = Board(config, storage=storage)
        try:
            await work(board)
        finally:
            await board.close()

    asyncio.run(asyncio.wait_for(run(), 90))


def ids(hits: list[dict]) -> list[int]:
    return [hit["id"] for hit in hits]


# -- the address and the secret ------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "ftp://hooks.example.com/",
        "http://hooks.example.com/",
        "http://127.0.0.1.example.com/",
        "http://127.1/",
        "http://2130706433/",
        "http://[::ffff:127.0.0.1]/",
        "https://user@hooks.example.com/",
        "https://hooks.example.com@other.example.com/",
        "https://hooks.example.com\\@other.example.com/",
        "https://hooks.example.com/#fragment",
        "https://hooks.example.com:99999/",
        "https://hooks.example.com:/",
        "https://HOOKS.example.com/",
        "https://h\u00f6oks.example.com/",
        "https://hooks.example.com/a b",
        "https://hooks.example.com/a\r\nHost: x",
        "https:///path",
        "//hooks.example.com/",
        "https://hooks.example.com/" + "a" * 2048,
    ],
)
def test_an_ambiguous_or_unencrypted_url_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Webhook(url=url)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://hooks.example.com", "hooks.example.com:443"),
        ("https://hooks.example.com:443/a?b=c&d=[%20]", "hooks.example.com:443"),
        ("https://hooks.example.com:8443/", "hooks.example.com:8443"),
        ("https://[2001:db8::1]/", "[2001:db8::1]:443"),
        ("http://localhost:9000/hits", "localhost:9000"),
        ("http://[::1]:80/", "[::1]:80"),
    ],
)
def test_the_host_of_a_url_is_the_host_that_the_http_client_connects_to(
    url: str, host: str
) -> None:
    webhook = Webhook(url=url)
    assert webhook.host == host
    parsed, name = httpx.URL(url), host.rpartition(":")[0]
    port = parsed.port or {"http": 80, "https": 443}[parsed.scheme]
    assert f"{name}:{port}" == host
    assert parsed.netloc.decode() in (host, name)
    assert webhook.check_allowed([host]) is webhook
    others = [[], ["example.com"], [f"{host}0"], ["other.example.com", "127.0.0.1"]]
    if parsed.port is None:  # the default port
        assert webhook.check_allowed([name]) is webhook
    else:
        others.append([name])
    for hosts in others:
        with pytest.raises(ValueError, match="--webhook-host"):
            webhook.check_allowed(hosts)


def test_an_allowed_host_is_a_name_and_a_port_without_a_scheme() -> None:
    assert allowed_host("Hooks.Example.com:8443") == "hooks.example.com:8443"
    assert ServingConfig(webhook_hosts=("A.b", "[::1]:9000")).webhook_hosts == ("a.b", "[::1]:9000")
    for text in ("https://a.b", "a.b/", "a.b:0", "a.b:70000", "*", "*.a.b", "", "a b", "-a"):
        with pytest.raises(ValueError, match=r"HOST or HOST:PORT"):
            allowed_host(text)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_c2hvcnQ=", "whsec_%", KEY.hex(), "x" * 40])
def test_an_invalid_secret_is_rejected_without_repeating_it(secret: str) -> None:
    with pytest.raises(ValueError, match="openssl") as caught:
        Webhook.model_validate({"url": "https://a.b/", "secret": secret})
    assert len(secret) < 10 or secret not in str(caught.value)


def test_a_secret_is_only_in_the_stored_form_of_a_watch() -> None:
    webhook = Webhook.model_validate({"url": "https://a.b/", "secret": SECRET})
    assert webhook.key == KEY
    for shown in (repr(webhook), str(webhook), str(webhook.model_dump()), repr(terms(webhook))):
        assert SECRET not in shown
    stored = terms(webhook).model_dump_json()
    assert SECRET in stored
    assert Terms.model_validate_json(stored).webhook == webhook


# -- delivery ------------------------------------------------------------------------------------


def test_hits_are_delivered_in_order_in_signed_batches(receiver: Receiver) -> None:
    async def work(board: Board) -> None:
        webhook = Webhook.model_validate({"url": f"{receiver.url}/", "secret": SECRET})
        watch = await board.create("a", terms(webhook))
        await publish(board, watch, *range(250))
        await until(lambda: len(receiver.accepted()) == 250)
        assert ids(receiver.accepted()) == list(range(250))
        assert [hit["cursor"] for hit in receiver.accepted()] == list(range(1, 251))
        assert [len(one.hits) for one in receiver.messages] == [100, 100, 50]
        assert [one.body["data"]["cursor"] for one in receiver.messages] == [100, 200, 250]
        assert {one.body["data"]["watch"] for one in receiver.messages} == {watch.id}
        assert len({one.id for one in receiver.messages}) == 3
        assert all(one.is_signed for one in receiver.messages)
        await publish(board, watch, 250)
        await until(lambda: len(receiver.messages) == 4)

    on_board(receiver, work)


def test_a_failed_request_is_repeated_with_the_same_id_and_content(receiver: Receiver) -> None:
    outcomes = iter([500, None, 404, 301, 200])
    receiver.headers = {"location": f"{receiver.url}/elsewhere"}
    receiver.respond = lambda message: next(outcomes, 200)

    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        await publish(board, watch, 1)
        await until(lambda: bool(receiver.messages))
        await publish(board, watch, 2, 3)
        await until(lambda: len(receiver.accepted()) == 3)
        first = receiver.messages[:5]
        assert [one.accepted for one in first] == [False] * 4 + [True]
        assert {one.id for one in first} == {first[0].id}
        assert [one.hits for one in first] == [first[0].hits] * 5
        assert {one.path for one in receiver.messages} == {"/"}  # redirects are not followed
        assert not first[0].is_signed
        assert ids(receiver.accepted()) == [1, 2, 3]

    on_board(receiver, work)


def test_the_state_of_the_delivery_is_shown(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_MIN_RETRY_SECONDS", 1000)
    monkeypatch.setattr(webhooks, "_MAX_RETRY_SECONDS", 2000)
    receiver.respond = lambda message: 503

    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        assert watch.delivery is not None
        assert (watch.delivery.cursor, watch.delivery.pending) == (0, 0)
        await publish(board, watch, 1, 2)
        while not (found := (await board.get("a", watch.id)).delivery) or not found.failures:
            await asyncio.sleep(0.01)
        assert (found.cursor, found.pending, found.failures) == (0, 2, 1)
        assert found.error == "the receiver responded with status 503"
        assert found.delivered_at is None
        assert found.next_attempt_at is not None
        assert found.next_attempt_at - watch.created_at > 400
        receiver.respond = lambda message: 200
        changed = {"webhook": Webhook(url=f"{receiver.url}/new")}  # is tried at once
        await board.change("a", watch.id, changed)
        await until(lambda: len(receiver.accepted("/new")) == 2)
        while (found := (await board.owned("a"))[0].delivery) is None or found.pending:
            await asyncio.sleep(0.01)
        assert (found.cursor, found.failures, found.error) == (2, 0, None)
        assert found.delivered_at is not None
        assert found.next_attempt_at is None
        await board.change("a", watch.id, {"webhook": None})
        await publish(board, watch, 3)
        assert (await board.get("a", watch.id)).delivery is None

    on_board(receiver, work)
    assert len(receiver.messages) == 2


def test_a_webhook_that_is_changed_during_a_failing_request_is_tried_at_once(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "_MIN_RETRY_SECONDS", 1000)
    monkeypatch.setattr(webhooks, "_MAX_RETRY_SECONDS", 2000)
    has_begun, is_changed = threading.Event(), threading.Event()

    def respond(message: Message) -> int:
        has_begun.set()
        is_changed.wait(90)
        return 200 if message.path == "/new" else 503

    receiver.respond = respond

    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        await publish(board, watch, 1)
        await until(has_begun.is_set)
        await board.change("a", watch.id, {"webhook": Webhook(url=f"{receiver.url}/new")})
        is_changed.set()
        await until(lambda: len(receiver.accepted("/new")) == 1)

    try:
        on_board(receiver, work)
    finally:
        is_changed.set()


def test_a_restarted_board_delivers_what_was_not_delivered(receiver: Receiver) -> None:
    storage = MemoryStorage()
    made: list[Watch] = []
    receiver.respond = lambda message: 200 if message.body["data"]["cursor"] <= 2 else 500

    async def before(board: Board) -> None:
        made.append(await board.create("a", terms(Webhook(url=f"{receiver.url}/"))))
        other = await board.create("a", terms(None))
        await publish(board, made[0], 1, 2)
        await until(lambda: len(receiver.accepted()) == 2)
        while (found := (await board.get("a", made[0].id)).delivery) is None or found.pending:
            await asyncio.sleep(0.01)
        await publish(board, made[0], 3)
        await publish(board, other, 3)
        await until(lambda: len(receiver.messages) > 2)

    async def after(board: Board) -> None:
        found = (await board.get("a", made[0].id)).delivery
        assert found is not None
        assert (found.cursor, found.pending) == (2, 1)
        assert found.delivered_at is not None
        await board.resume()
        await until(lambda: len(receiver.accepted()) == 3)

    on_board(receiver, before, storage)
    receiver.respond = lambda message: 200
    on_board(receiver, after, storage)
    assert ids(receiver.accepted()) == [1, 2, 3]


def test_a_webhook_that_is_added_later_receives_only_new_hits(receiver: Receiver) -> None:
    storage = MemoryStorage()
    made: list[Watch] = []

    async def before(board: Board) -> None:
        made.append(await board.create("a", terms(None)))
        await publish(board, made[0], 1, 2)
        await board.change("a", made[0].id, {"webhook": Webhook(url=f"{receiver.url}/")})

    async def after(board: Board) -> None:
        await board.resume()
        await publish(board, made[0], 3)
        await until(lambda: bool(receiver.messages))
        await board.remove("a", made[0].id)
        await board.publish([], {})

    on_board(receiver, before, storage)
    on_board(receiver, after, storage)
    assert ids(receiver.accepted()) == [3]
    assert list(storage) == []


def test_dropped_hits_are_counted_in_the_next_request(receiver: Receiver) -> None:
    receiver.respond = lambda message: 500

    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        await publish(board, watch, 1)
        await until(lambda: bool(receiver.messages))
        await publish(board, watch, 2, 3, 4, 5)
        receiver.respond = lambda message: 200
        await until(lambda: 5 in ids(receiver.accepted()))
        data = [one.body["data"] for one in receiver.messages if one.accepted]
        # A repeated request with the first hit may have been on its way.
        assert ids(receiver.accepted())[-2:] == [4, 5]
        assert sum(one["dropped"] for one in data) == 5 - len(receiver.accepted()) > 1

    on_board(receiver, work, max_watch_hits=2)


def test_a_host_that_is_no_longer_allowed_receives_nothing(receiver: Receiver) -> None:
    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        await board.configure(ServingConfig())
        await publish(board, watch, 1)
        while not (found := (await board.get("a", watch.id)).delivery) or not found.failures:
            await asyncio.sleep(0.01)
        assert "webhooks are disabled" in str(found.error)
        assert receiver.messages == []
        await board.configure(ServingConfig(webhook_hosts=(receiver.host,)))
        await until(lambda: bool(receiver.accepted()))

    on_board(receiver, work)


def test_receivers_that_do_not_respond_delay_neither_hits_nor_other_receivers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_request, "_SECONDS", 0.5)
    is_over = threading.Event()

    def respond(message: Message) -> int:
        if message.path == "/slow":
            is_over.wait(90)
        return 200

    receiver.respond = respond

    async def work(board: Board) -> None:
        slow = [
            await board.create("a", terms(Webhook(url=f"{receiver.url}/slow"))) for _ in "abcdef"
        ]
        fast = await board.create("b", terms(Webhook(url=f"{receiver.url}/")))
        for watch in slow:
            await publish(board, watch, 1)
        for index in range(20):
            await publish(board, fast, index)
        await until(lambda: len(receiver.accepted()) == 20)
        assert receiver.accepted("/slow") == []
        while not (found := (await board.get("a", slow[0].id)).delivery) or not found.failures:
            await asyncio.sleep(0.01)
        assert found.error == "no response within 0.5 s"

    try:
        on_board(receiver, work)
    finally:
        is_over.set()


def test_a_watch_that_ends_while_its_delivery_waits_for_others_sends_nothing(
    receiver: Receiver,
) -> None:
    is_over = threading.Event()

    def respond(message: Message) -> int:
        is_over.wait(90)
        return 200

    receiver.respond = respond

    async def work(board: Board) -> None:
        webhooks = [Webhook(url=f"{receiver.url}/{number}") for number in range(6)]
        made = [await board.create("a", terms(webhook)) for webhook in webhooks]
        for watch in made:
            await publish(board, watch, 1)
        await board.remove("a", made[4].id)
        await board.change("a", made[5].id, {"webhook": Webhook(url=f"{receiver.url}/new")})
        is_over.set()
        await until(lambda: bool(receiver.accepted("/new")))
        await until(lambda: len(receiver.messages) == 5)

    on_board(receiver, work)
    assert {one.path for one in receiver.messages} == {"/0", "/1", "/2", "/3", "/new"}


def test_long_and_compressed_responses_are_not_read(receiver: Receiver) -> None:
    receiver.response = b"x" * 2**22
    receiver.headers = {"content-encoding": "gzip"}

    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        for index in range(3):
            await publish(board, watch, index)
            await until(lambda count=index + 1: len(receiver.messages) == count)
        while (found := (await board.get("a", watch.id)).delivery) is None or found.pending:
            await asyncio.sleep(0.01)
        assert len(receiver.accepted()) == 3

    on_board(receiver, work)


def test_proxies_and_passwords_from_the_environment_are_ignored(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def work(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        await publish(board, watch, 1)
        await until(lambda: bool(receiver.accepted()))

    on_board(receiver, work)


def test_a_message_that_was_repeated_after_a_restart_has_the_same_hit_ids(
    receiver: Receiver,
) -> None:
    class Forgetful(MemoryStorage):
        """Loses the cursors, as if the process was killed right after each delivery."""

        def apply(self, changes):  # type: ignore[no-untyped-def]
            super().apply({key: one for key, one in changes.items() if "sent/" not in key})

    storage = Forgetful()

    async def before(board: Board) -> None:
        watch = await board.create("a", terms(Webhook(url=f"{receiver.url}/")))
        await publish(board, watch, 1, 2)
        await until(lambda: len(receiver.messages) == 1)

    async def after(board: Board) -> None:
        await board.resume()
        await until(lambda: len(receiver.messages) == 2)

    on_board(receiver, before, storage)
    on_board(receiver, after, storage)
    assert receiver.messages[0] == receiver.messages[1]


# -- the API -------------------------------------------------------------------------------------


def test_the_api_shows_the_delivery_but_never_the_secret(
    kway: Kway, alice: httpx.Client, images: list[bytes], listener: Receiver
) -> None:
    made = create_watch(alice, webhook={"url": f"{listener.url}/", "secret": SECRET})
    assert (made["webhook"]["url"], made["webhook"]["is_signed"]) == (
        f"{listener.url}/",
        True,
    )
    send_frames(alice, frames(images[:2], id="a"))
    eventually(lambda: len(listener.accepted()) == 2)
    path = f"/v1/watches/{made['id']}"
    eventually(lambda: alice.get(path).json()["webhook"]["cursor"] == 2)
    with alice.stream("GET", f"{path}/hits", params={"after": 0}) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines))["listening"] == made["id"]
        assert [json.loads(next(lines)) for _ in range(2)] == listener.accepted()
    texts = [alice.get(url).text for url in (path, "/v1/watches", "/openapi.json")]
    changed = alice.patch(path, json={"webhook": {"url": f"{listener.url}/other"}})
    assert changed.json()["webhook"]["is_signed"] is False
    assert changed.json()["webhook"]["cursor"] == 2
    texts += [changed.text, alice.patch(path, json={"label": "x"}).text]
    assert changed.json()["webhook"] == alice.get(path).json()["webhook"]
    removed = alice.patch(path, json={"webhook": None})
    assert removed.json()["webhook"] is None
    assert not any(SECRET[10:30] in text for text in texts)
    assert all(one.is_signed for one in listener.messages)


def test_the_api_rejects_other_hosts_and_invalid_webhooks(
    kway: Kway, alice: httpx.Client, listener: Receiver
) -> None:
    body = {"classes": ["husky"], "threshold": 0, "ttl_seconds": 60}

    def rejected(webhook: object) -> tuple[int, str]:
        response = alice.post("/v1/watches", json={**body, "webhook": webhook})
        assert SECRET[6:] not in response.text
        return response.status_code, response.json()["error"]["code"]

    for url in ("https://hooks.example.com/", "http://127.0.0.1/", "http://localhost:9/"):
        assert rejected({"url": url, "secret": SECRET}) == (422, "webhook_not_allowed")
    for invalid in (
        {"url": listener.url, "secret": SECRET[6:]},
        {"secret": SECRET},
        SECRET,
        1,
        [],
    ):
        assert rejected(invalid) == (422, "invalid_watch")
    path = f"/v1/watches/{create_watch(alice)['id']}"
    response = alice.patch(path, json={"webhook": {"url": "https://hooks.example.com/"}})
    assert response.json()["error"]["code"] == "webhook_not_allowed"
    assert alice.get(path).json()["webhook"] is None
