"""The Open Inference Protocol with KServe's Python client, over REST and gRPC.

kserve requires older versions of packages that kway uses, so the test installs it into a virtual
environment of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.serving.live.servers import TOKEN
from tests.serving.started import Server, as_json

KSERVE = "kserve==0.21.0"
_CALL = """
import asyncio, json, sys
from pathlib import Path
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

url, address, token, *paths = sys.argv[1:]
headers = {"authorization": f"Bearer {token}"}
metadata = tuple(headers.items())

files = [Path(path).read_bytes() for path in paths]

def typed(recall):
    images = InferInput("images", [len(paths)], "BYTES", data=list(files))
    classes = InferInput("class_ids", [2], "INT64", data=[2, 6])
    return InferRequest("pets", [images, classes], parameters={"recall": recall})

def request(recall):
    images = InferInput("images", [len(paths)], "BYTES")
    images.set_data_from_numpy(np.array(files, dtype=object))
    classes = InferInput("class_ids", [2], "INT64")
    classes.set_data_from_numpy(np.array([2, 6]))
    return InferRequest("pets", [images, classes], request_id="7", parameters={"recall": recall})

def outputs(answer):
    return {one.name: one.as_numpy().tolist() for one in answer.outputs}

async def main():
    found = {}
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as rest:
        assert await rest.is_server_live(url) and await rest.is_server_ready(url)
        assert await rest.is_model_ready(url, "pets", headers=headers)
        assert not await rest.is_model_ready(url, "cars", headers=headers)
        answer = await rest.infer(url, request(0.9), "pets", headers=dict(headers))
        found["rest"] = outputs(answer)
    async with InferenceGRPCClient(address) as client:
        assert await client.is_server_live() and await client.is_server_ready()
        assert await client.is_model_ready("pets", headers=metadata)
        # This client cannot send floating-point parameters.
        found["grpc"] = outputs(await client.infer(request("0.9"), headers=metadata))
        found["typed"] = outputs(await client.infer(typed("0.9"), headers=metadata))
    print(json.dumps(found))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def python_with_kserve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kserve") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=600)
    python = folder / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", KSERVE]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=600)
    if installed.returncode != 0:
        pytest.skip(f"requires {KSERVE} from a package index: {installed.stderr[-300:]}")
    return python


@pytest.mark.slow
def test_kserves_client_gets_the_same_verdicts_as_the_query_api(
    python_with_kserve: Path, server: Server, client: httpx.Client, images: list[Path]
) -> None:
    arguments = [server.url, server.grpc, TOKEN, *map(str, images[:3])]
    ran = subprocess.run(
        [python_with_kserve, "-I", "-c", _CALL, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    body = as_json(images[:3], classes=[2, 6], recall=0.9)
    rows = [one["verdicts"] for one in client.post("/v1/query", json=body).json()["results"]]
    for outputs in (found["rest"], found["grpc"], found["typed"]):
        for row, scores in zip(rows, outputs["scores"], strict=True):
            assert scores == pytest.approx([one["score"] for one in row], rel=1e-4, abs=1e-5)
        assert outputs["matches"] == [[one["match"] for one in row] for row in rows]
        assert outputs["thresholds"] == pytest.approx([one["threshold"] for one in rows[0]])
