"""New versions and several models on a complete server, and runs of `tests/serving/swaps.py`."""

import re
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from serving.client import Client, RejectedError
from tests.serving import swaps
from tests.serving.live.servers import write_tokens
from tests.serving.published import ADMIN, Expected, publish, write_versions
from tests.serving.started import end, start
from tests.serving.watching import eventually

_BACKBONE_MIB = 150


@pytest.mark.slow
def test_kway_serve_serves_several_models_and_new_versions(tmp_path: Path) -> None:
    versions, path, admins = write_versions(tmp_path), tmp_path / "pets", tmp_path / "admins"
    first, second = Expected(versions).versions
    publish(versions[0], path)
    write_tokens(admins, ADMIN)
    options = ("--model", f"others={versions[1]}", "--admin-token-file", admins, "--grpc-port", 0)
    server = start(path, tmp_path / "stderr", *options)
    try:
        with (
            Client(server.url) as pets,
            Client(server.url, model="others") as others,
            Client(server.url, token=ADMIN) as admin,
        ):
            assert [(one.name, one.version) for one in pets.models()] == [
                ("pets", first),
                ("others", second),
            ]
            for client, version in ((pets, first), (others, second)):
                assert client.query(["husky"], ["a cat"]).version == version
                watch = client.create_watch(["husky"], threshold=-1e6, ttl_seconds=60)
                hit, _ = client.feed("door", ["a cat"])
                assert (hit.watch, hit.version) == (watch.id, version)
                assert len(list(client.stream(["husky"], ["a cat"] * 3, all=True))) == 4
            assert grpc_version(server.grpc, "pets") == first
            publish(tmp_path / "missing", path)
            with pytest.raises(RejectedError, match=f"Version {first} continues to serve"):
                admin.reload()
            publish(versions[1], path)
            assert {one.version for one in admin.reload()} == {second}
            assert grpc_version(server.grpc, "pets") == second
            publish(versions[0], path)
            eventually(lambda: pets.query(["husky"], ["a cat"]).version == first)

        def metrics() -> str:
            return httpx.get(f"{server.url}/metrics").text

        served = rf'kway_model_version{{.*model="pets".*version="{first}".*}} 1.0'
        eventually(lambda: re.search(served, metrics()))
        assert re.search(rf'kway_model_version{{.*model="others".*version="{second}"', metrics())
        assert re.search(r'kway_reloads_total{.*model="pets".*outcome="failed".*} 1.0', metrics())
        assert f"model pets: version {second} is served now" in server.errors.read_text()
    finally:
        end(server)


def grpc_version(address: str, model: str) -> str:
    texts, classes = (InferInput(name, [1], "BYTES") for name in ("texts", "classes"))
    texts.set_data_from_numpy(np.array([b"a cat"], dtype=object))
    classes.set_data_from_numpy(np.array([b"husky"], dtype=object))
    with InferenceServerClient(address) as client:
        return client.infer(model, [texts, classes]).get_response().model_version


@pytest.mark.slow
def test_20000_requests_during_swaps_are_answered_by_the_version_which_they_name() -> None:
    outcome = swaps.run(20_000, 10, backbone_mib=_BACKBONE_MIB)
    assert outcome.problems == []
    assert outcome.answers.total() >= 20_000
    assert len(outcome.answers) == 2
    assert (outcome.swaps, outcome.damaged) == (10, 10)
    # No replica has kept an old version.
    assert outcome.resident_mib[-1] - outcome.resident_mib[0] < _BACKBONE_MIB


@pytest.mark.slow
def test_replicas_that_are_killed_during_swaps_serve_the_new_version() -> None:
    outcome = swaps.run(2000, 4, num_kills=3)
    assert outcome.problems == []
    assert (outcome.swaps, outcome.kills) == (4, 3)
    assert len(outcome.answers) == 2
