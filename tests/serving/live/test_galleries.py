"""Changes of a gallery on a server with two replicas."""

import time
from pathlib import Path

import httpx
import psutil

from serving.client import Client, RejectedError
from serving.galleries.live import _RETRY_SECONDS
from tests.serving.started import Server, SharedServer

NUM = 6


def searches(server: Server, count: int = 12) -> list[list[str]]:
    """Return the ids of the hits of several searches, each on a new connection, so that both
    replicas answer some of them.
    """
    found = []
    for number in range(count):
        body = {"classes": ["husky"], "limit": 100, "exact": number % 2 == 0}
        response = httpx.post(f"{server.url}/v1/galleries/pets/search", json=body, timeout=30)
        assert response.status_code == 200, response.text
        assert response.json()["exact"] == body["exact"]
        found.append([hit["id"] for hit in response.json()["results"][0]["hits"]])
    return found


def test_all_replicas_see_a_change_as_soon_as_it_was_answered(
    open_server: SharedServer, images: list[Path]
) -> None:
    server = open_server.get()
    before = searches(server)[0]
    assert len(before) == NUM
    with Client(server.url) as client:
        one, two = client.insert_items("pets", images[:2])
        assert {len(ids) for ids in searches(server)} == {NUM + 2}
        for item_id in (one.id, before[3]):
            client.delete_item("pets", item_id)
            assert all(item_id not in ids for ids in searches(server))
        similar = client.search_similar("pets", [two.id], limit=1)[0].hits
        assert similar[0].score > 0.999
        for item in (two.id, before[0]):
            response = httpx.get(f"{server.url}/v1/galleries/pets/items/{item}/thumbnail")
            assert response.headers["content-type"] == "image/jpeg"


def test_changes_survive_the_death_of_the_process_that_stores_them(
    open_server: SharedServer, images: list[Path]
) -> None:
    server = open_server.get()
    with Client(server.url) as client:
        (new,) = client.insert_items("pets", [images[3]])
        expected = searches(server, 1)[0]
        (actor,) = [
            process
            for process in psutil.Process(server.process.pid).children(recursive=True)
            if "WatchActor" in process.name()
        ]
        actor.kill()
        actor.wait(60)
        # A replica may not have requested the last change yet.
        known = {*map(tuple, searches(server))}
        assert known <= {tuple(expected), tuple(one for one in expected if one != new.id)}
        until = time.monotonic() + 60
        while True:
            try:
                client.delete_item("pets", new.id)
                break
            except RejectedError as error:
                if error.status != 503 or time.monotonic() > until:
                    raise
                time.sleep(0.5)
        time.sleep(_RETRY_SECONDS)
        assert searches(server) == [[one for one in expected if one != new.id]] * 12
