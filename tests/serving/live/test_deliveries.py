"""Webhooks of a real server: delivery from the Ray actor, its death, and the metrics."""

import httpx
import psutil

from tests.serving.live.test_feeds import client, eventually, images, processes, server
from tests.serving.receiver import SECRET, Receiver
from tests.serving.started import Server
from tests.serving.watching import create_watch, frames, send_frames

__all__ = ["client", "images", "server"]  # fixtures


def test_the_death_of_the_actor_delays_a_delivery_even_if_no_one_uses_the_server(
    server: Server, client: httpx.Client, images: list[bytes], receiver: Receiver
) -> None:
    receiver.respond = lambda message: 500
    made = create_watch(client, webhook={"url": f"{receiver.url}/", "secret": SECRET})
    (hit, *_) = send_frames(client, frames(images[:1], id="a"))
    path = f"/v1/watches/{made['id']}"
    eventually(lambda: client.get(path).json()["webhook"]["failures"] > 0)
    (actor,) = processes(server, "WatchActor")
    actor.kill()
    psutil.wait_procs([actor], timeout=60)
    receiver.messages.clear()
    receiver.respond = lambda message: 200
    eventually(lambda: bool(receiver.accepted()))
    eventually(lambda: client.get(path).status_code == 200)
    # The receiver may also have accepted the last request of the killed actor.
    eventually(lambda: client.get(path).json()["webhook"]["cursor"] == 1)
    found = client.get(path).json()["webhook"]
    assert (found["pending"], found["failures"]) == (0, 0)
    assert found["delivered_at"] is not None
    assert all(one == hit for one in receiver.accepted())
    assert receiver.problems == []
    assert SECRET not in server.errors.read_text()

    def is_counted() -> bool:
        lines = client.get("/metrics").text.splitlines()
        found = [one for one in lines if one.startswith("kway_webhook_deliveries_total{")]
        return any('outcome="ok"' in one for one in found)

    eventually(is_counted)
