"""Limits per client are the same with tokens, where a client is a token, and without, where it is
an address.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from serving.config import ServingConfig
from serving.inference.methods import InferenceMethods
from serving.metrics import Metrics
from serving.tokens import Clients
from serving.versions import ServedModel
from tests.serving.in_process import Call, Recorder, application, listening, occupied
from tests.serving.page_driver import image
from tests.serving.started import error_of
from tests.waiting import wait_until

ADDRESS = "x-client"
MAX_BODY = 20_000
BATCH_WAIT = 3.0  # a query occupies its slot for this long
LIMITS = {
    "max_requests": 4,
    "max_requests_per_client": 1,
    "max_uploads_per_client": 1,
    "max_body_bytes": MAX_BODY,
    "max_upload_bytes_per_client": MAX_BODY,
}


Headers = dict[str, str]


@pytest.fixture(scope="module")
def served(bundle: Path) -> Iterator[tuple[str, Headers, Headers]]:
    """The URL of a server, and the headers of two clients."""
    limits = {"batch_wait_seconds": BATCH_WAIT, "client_address_header": "X-Client", **LIMITS}
    with listening(application(bundle, **limits)) as url:
        yield url, {ADDRESS: "192.0.2.1"}, {ADDRESS: "192.0.2.2"}


def query(url: str, headers: Headers) -> httpx.Response:
    files = [("images", image(0))]
    return httpx.post(f"{url}/v1/query", data={"classes": ["husky"]}, files=files, headers=headers)


def is_rejected(url: str, headers: Headers) -> bool:
    """Return whether the client is at its limit. Otherwise, the empty body is rejected."""
    return httpx.post(f"{url}/v1/query", headers=headers).status_code == 429


def test_a_client_at_its_limit_of_requests_leaves_requests_for_others(
    served: tuple[str, Headers, Headers],
) -> None:
    url, one, other = served
    with occupied(url, **one):
        wait_until(lambda: is_rejected(url, one))
        rejected = query(url, one)
        assert error_of(rejected)[:2] == (429, "too_many_requests")
        assert rejected.headers["retry-after"] == "1"
        assert query(url, other).status_code == 200
    wait_until(lambda: query(url, one).status_code == 200)


def test_the_last_address_counts_and_the_rest_is_ignored(
    served: tuple[str, Headers, Headers],
) -> None:
    url, one, other = served
    with occupied(url, **one):
        wait_until(lambda: is_rejected(url, one))
        for address in ("192.0.2.1", "192.0.2.2, 192.0.2.1", "::ffff:192.0.2.1"):
            assert is_rejected(url, {ADDRESS: address})
        assert not is_rejected(url, {ADDRESS: "192.0.2.1, 192.0.2.2"})
        assert not is_rejected(url, other)


def key_of(*addresses: str) -> str:
    return Clients(None, ADDRESS).client_of([], addresses)


def test_the_limit_key_of_an_address_is_its_network() -> None:
    assert key_of("192.0.2.1") == "192.0.2.1"
    assert key_of("2001:db8:1:2::1") == key_of("2001:db8:1:2:ffff::") == "2001:db8:1:2::/64"
    assert key_of("2001:db8:1:3::1") != key_of("2001:db8:1:2::1")
    assert key_of() == key_of("x") == key_of("") == key_of("192.0.2.1", "no address") == "anonymous"
    assert key_of("192.0.2.1", "192.0.2.2") == "192.0.2.2"


# ---------------------------------------------------------------------------- gRPC


@pytest.fixture(scope="module")
def methods(bundle: Path) -> InferenceMethods:
    config = ServingConfig(threads=1, **{**LIMITS, "max_requests_per_client": 2})  # type: ignore[arg-type]
    model = ServedModel(bundle, config, Metrics(Recorder()))
    return InferenceMethods(model, Clients(None, ADDRESS))


def request(num_bytes: int) -> bytes:
    """Build a request that is about `num_bytes` long."""
    found = pb.ModelInferRequest(model_name="pets", id="x" * num_bytes)
    found.inputs.add(name="images", datatype="BYTES", shape=[1])
    found.inputs.add(name="class_ids", datatype="INT64", shape=[1])
    file = image(0)
    found.raw_input_contents.append(len(file).to_bytes(4, "little") + file)
    found.raw_input_contents.append((2).to_bytes(8, "little"))
    return found.SerializeToString()


def codes(methods: InferenceMethods, *calls: tuple[str, int]) -> list[str]:
    """Make the calls at the same time, each with an address and a size, and return their codes."""
    contexts = [Call({ADDRESS: address}) for address, _ in calls]

    async def all_at_once() -> None:
        pairs = zip(contexts, calls, strict=True)
        await asyncio.gather(
            *(methods.call("ModelInfer", request(size), context) for context, (_, size) in pairs)
        )

    asyncio.run(all_at_once())
    return ["OK" if one.code is None else one.code.name for one in contexts]


def test_grpc_calls_have_the_same_limits_per_client(methods: InferenceMethods) -> None:
    one, other = "192.0.2.1", "192.0.2.2"
    small, large = 10, MAX_BODY // 2
    three = [(one, small)] * 3
    assert codes(methods, *three, (other, small)) == ["OK", "OK", "RESOURCE_EXHAUSTED", "OK"]
    assert codes(methods, *three[:2]) == ["OK", "OK"]
    assert codes(methods, (one, large), (one, large), (other, large)) == [
        "OK", "RESOURCE_EXHAUSTED", "OK"
    ]  # fmt: skip
    assert codes(methods, (one, large)) == ["OK"]
