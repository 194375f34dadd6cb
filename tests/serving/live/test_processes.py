"""Ports, processes and metrics of a server on each runner."""

import grpc
import httpx
import psutil
import pytest

from tests.serving.in_process import refusal
from tests.serving.live.servers import REPLICAS, TOKEN
from tests.serving.started import (
    Server,
    counts,
    of_each,
    replicas_of,
)
from tests.waiting import wait_until


def listening(server: Server) -> set[str]:
    return {
        f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        for connections in of_each(server, psutil.Process.net_connections)
        for ip, port in [
            (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        ]
    }


def test_the_command_prints_every_port_and_no_unnecessary_one_is_open(
    server: Server, runner: str
) -> None:
    asked = {server.url.removeprefix("http://"), server.grpc}
    found = listening(server)
    assert found == set(server.listening)
    elsewhere = {one for one in found if not one.startswith("127.0.0.1:")}
    if runner == "no-ray":
        assert found == asked
    else:  # Ray's options have no host for gRPC, and each replica opens one port more
        assert f"[::]:{server.grpc.rpartition(':')[2]}" in elsewhere
        assert len(elsewhere) == 1 + REPLICAS


def test_the_port_that_each_replica_opens_on_all_interfaces_requires_the_token_of_ray(
    server: Server, runner: str
) -> None:
    """Ray deserializes the requests to this port with pickle."""
    if runner == "no-ray":
        pytest.skip("there is no such port")
    port = server.grpc.rpartition(":")[2]
    opened = [one for one in server.listening if one.startswith("[::]:") and one != f"[::]:{port}"]
    assert len(opened) == REPLICAS
    for address in opened:
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary("/ray.serve.ASGIService/HandleRequest")
            with pytest.raises(grpc.RpcError) as caught:
                call(b"", timeout=30)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_only_processes_with_a_model_load_torch(server: Server, runner: str) -> None:
    def libraries(process: psutil.Process) -> tuple[int, bool]:
        return process.pid, any("/libtorch" in one.path for one in process.memory_maps())

    found = {pid for pid, has_torch in of_each(server, libraries) if has_torch}
    if runner == "no-ray":
        assert of_each(server, lambda process: process.pid) == [server.process.pid]
    assert found == {server.process.pid, *replicas_of(server)}


def test_no_server_process_has_a_lower_priority_than_the_command(server: Server) -> None:
    """By default, Ray runs replicas at nice 15, where any other process can starve them."""
    (command, *others) = of_each(server, lambda process: (process.nice(), process.name()))
    assert [other for other in others if other[0] > command[0]] == []


# ---------------------------------------------------------------------------- metrics


def test_the_counts_match_the_requests_sent(server: Server, client: httpx.Client) -> None:
    body = {"classes": ["husky"], "images": ["?"]}
    for _ in range(3):  # no other test of this server causes this error
        assert refusal(client.post("/v1/query", json=body))[1] == "invalid_base64"
    key = "kway_query_requests_total:invalid_base64"
    wait_until(lambda: counts(server, TOKEN).get(key) == 3)  # Ray collects them every 10 s
    assert counts(server, TOKEN)["kway_model_aligned"] >= 1


def test_metrics_are_on_the_port_of_their_runner(client: httpx.Client, runner: str) -> None:
    answer = client.get("/metrics")
    if runner == "ray":
        assert refusal(answer) == (404, "metrics_of_ray")
    else:
        assert answer.headers["content-type"].startswith("text/plain")
        assert "kway_model_version{" in answer.text
