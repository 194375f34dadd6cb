"""Every interface of a server returns the same logits and decisions as the evaluation.

The complete validation set is sent to a real server over REST, over the Open Inference Protocol
(REST and gRPC), with the Python client and through the page in a real Chromium.
"""

import base64
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import expect
from tritonclient import grpc as triton

from serving.client import Client
from tests.serving.browsing import chromium, visit
from tests.serving.evaluated import RECALL, Evaluated
from tests.serving.evaluated import evaluated as of_run
from tests.serving.started import Server, end, start
from tests.shards import glyph_recipe

# These tests take over 40 s. In the default suite, live/test_http.py and live/test_grpc.py compare
# a server's answers with the bundle's, and tests/trainer/test_export.py compares the bundle with
# the evaluation.
pytestmark = pytest.mark.slow


def check(evaluated: Evaluated, scores: object, decisions: object) -> None:
    found = np.asarray(scores, dtype=np.float32)
    assert found.std(axis=0).min() > 1e-3, "the scores of the inputs must differ"
    np.testing.assert_allclose(found, evaluated.scores, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(decisions, dtype=bool), evaluated.decisions)


@pytest.fixture(scope="module")
def evaluated(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    folder = tmp_path_factory.mktemp("evaluated")
    found = of_run(glyph_recipe(glyphs, folder / "run"), folder / "glyphs")
    assert 0 < found.decisions.mean() < 1
    return found


@pytest.fixture(scope="module")
def server(evaluated: Evaluated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    errors = tmp_path_factory.mktemp("server") / "stderr"
    running = start(evaluated.bundle, errors, "--grpc-port", 0, "--no-tokens")
    yield running
    end(running)


def ids(evaluated: Evaluated) -> list[int]:
    return list(range(len(evaluated.names)))


def in_base64(evaluated: Evaluated) -> list[str]:
    return [base64.b64encode(image).decode() for image in evaluated.inputs]


def test_rest_returns_the_evaluation_results(server: Server, evaluated: Evaluated) -> None:
    body = {"images": in_base64(evaluated), "classes": ids(evaluated), "recall": RECALL}
    answer = httpx.post(f"{server.url}/v1/query", json=body).raise_for_status().json()
    rows = [result["verdicts"] for result in answer["results"]]
    check(evaluated, *([[v[key] for v in row] for row in rows] for key in ("score", "match")))


def test_the_inference_protocol_over_rest_returns_the_evaluation_results(
    server: Server, evaluated: Evaluated
) -> None:
    shape = len(evaluated.inputs), len(evaluated.names)
    body = {
        "parameters": {"recall": RECALL},
        "inputs": [
            {
                "name": "images",
                "datatype": "BYTES",
                "shape": shape[:1],
                "data": in_base64(evaluated),
            },
            {"name": "class_ids", "datatype": "INT64", "shape": shape[1:], "data": ids(evaluated)},
        ],
    }
    address = f"{server.url}/v2/models/{evaluated.bundle.name}/infer"
    answer = httpx.post(address, json=body).raise_for_status().json()
    outputs = {one["name"]: np.reshape(one["data"], one["shape"]) for one in answer["outputs"]}
    check(evaluated, outputs["scores"], outputs["matches"])


def test_the_inference_protocol_over_grpc_returns_the_evaluation_results(
    server: Server, evaluated: Evaluated
) -> None:
    images = triton.InferInput("images", [len(evaluated.inputs)], "BYTES")
    images.set_data_from_numpy(np.array(evaluated.inputs, dtype=np.object_))
    classes = triton.InferInput("class_ids", [len(evaluated.names)], "INT64")
    classes.set_data_from_numpy(np.array(ids(evaluated), dtype=np.int64))
    with triton.InferenceServerClient(server.grpc) as client:
        answer = client.infer(
            evaluated.bundle.name, [images, classes], parameters={"recall": RECALL}
        )
    check(evaluated, answer.as_numpy("scores"), answer.as_numpy("matches"))


def test_the_client_returns_the_evaluation_results(server: Server, evaluated: Evaluated) -> None:
    with Client(server.url) as client:
        answer = client.query(evaluated.names, evaluated.inputs, recall=RECALL)
    rows = [result.verdicts for result in answer.results]
    check(
        evaluated,
        [[v.score for v in row] for row in rows],
        [[v.match for v in row] for row in rows],
    )


def test_the_page_shows_the_evaluation_results(server: Server, evaluated: Evaluated) -> None:
    files = [
        {"name": f"{index}.png", "mimeType": "image/png", "buffer": image}
        for index, image in enumerate(evaluated.inputs)
    ]
    with chromium() as browser, visit(browser, server.url) as page:
        for number, name in enumerate(evaluated.names, 1):
            page.locator("#class-input").fill(name)
            page.locator("#class-input").press("Enter")
            expect(page.locator(".chip")).to_have_count(number)
        page.locator("#choose input").set_input_files(files)
        expect(page.locator(".verdict")).to_have_count(evaluated.scores.size)
        shown = page.locator(".verdict").evaluate_all(
            "rows => rows.map(row => [+row.dataset.classId, "
            "+row.querySelector('.score').value, row.querySelector('.badge').textContent])"
        )
    table = [
        shown[start : start + len(evaluated.names)]
        for start in range(0, len(shown), len(evaluated.names))
    ]
    assert all([class_id for class_id, _, _ in row] == ids(evaluated) for row in table)
    words = {"Yes": True, "No": False}
    check(
        evaluated,
        [[score for _, score, _ in row] for row in table],
        [[words[word.split()[-1]] for _, _, word in row] for row in table],
    )
