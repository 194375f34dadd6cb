"""New versions on a complete server, and runs of `tests/serving/swaps.py`."""

import re
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from serving.client import Client
from tests.serving import swaps
from tests.serving.published import Expected, publish, write_versions
from tests.serving.started import end, start
from tests.waiting import wait_until

_BACKBONE_MIB = 150


@pytest.mark.slow
def test_kway_serve_serves_new_versions(tmp_path: Path) -> None:
    versions, path = write_versions(tmp_path), tmp_path / "pets"
    first, second = Expected(versions).versions
    publish(versions[0], path)
    server = start(path, tmp_path / "stderr", "--grpc-port", 0, "--no-tokens")

    def metrics() -> str:
        return httpx.get(server.metrics).text

    try:
        with Client(server.url) as client:
            assert client.query(["husky"], ["a cat"]).version == first
            assert grpc_version(server.grpc, "pets") == first
            shutil.copytree(versions[1], tmp_path / "damaged")
            (tmp_path / "damaged" / "backbone.safetensors").unlink()
            publish(tmp_path / "damaged", path)
            failed = r'kway_reloads_total{.*model="pets".*outcome="failed".*} 1.0'
            wait_until(lambda: re.search(failed, metrics()))
            assert client.query(["husky"], ["a cat"]).version == first
            publish(versions[1], path)
            wait_until(lambda: client.query(["husky"], ["a cat"]).version == second)
            assert grpc_version(server.grpc, "pets") == second
        served = rf'kway_model_version{{.*model="pets".*version="{second}".*}} 1.0'
        wait_until(lambda: re.search(served, metrics()))
        assert f"Version {first} continues to serve" in server.errors.read_text()
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
@pytest.mark.parametrize("no_ray", [True, False])
def test_20000_requests_during_swaps_are_answered_by_the_version_which_they_name(
    no_ray: bool,
) -> None:
    outcome = swaps.run(20_000, 10, backbone_mib=_BACKBONE_MIB, no_ray=no_ray)
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
