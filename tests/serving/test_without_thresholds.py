"""A bundle without thresholds is served: scores, and verdicts for a threshold of the user."""

from pathlib import Path

import pytest

from tests.serving.in_process import application, ask, refusal
from tests.serving.page_driver import image
from tests.tiny_bundle import NAMES, write


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundles") / "imported"
    return write(path, changes={"recalls": []}, measured=None)


def query(api, **fields: object):
    return ask(
        api,
        "POST",
        "/v1/query",
        files={"images": ("0.png", image(0), "image/png")},
        data={"classes": NAMES[:2], **fields},
    )


def test_queries_return_scores_and_verdicts_only_for_a_given_threshold(bundle):
    api = application(bundle)
    assert ask(api, "GET", "/v1/model").json()["recalls"] == []
    scores = query(api).json()
    assert scores["thresholds"] == []
    verdicts = scores["results"][0]["verdicts"]
    assert [verdict["class"] for verdict in verdicts] == list(NAMES[:2])
    assert {(verdict["threshold"], verdict["match"]) for verdict in verdicts} == {(None, None)}
    cutoff = verdicts[0]["score"]
    decided = query(api, threshold=str(cutoff)).json()
    assert decided["results"][0]["verdicts"][0]["match"] == (
        decided["results"][0]["verdicts"][0]["score"] >= cutoff
    )
    assert {one["threshold_source"] for one in decided["thresholds"]} == {"request"}
    assert [one["class_samples"] for one in decided["thresholds"]] == [None, None]


def test_a_recall_is_rejected_with_the_fix(bundle, tmp_path, kway, capsys):
    rejected = query(application(bundle), recall="0.9")
    status, _ = refusal(rejected)
    assert status in (400, 404, 422)
    assert "kway calibrate" in rejected.json()["error"]["message"]
    file = tmp_path / "0.png"
    file.write_bytes(image(0))
    assert kway("query", bundle, "--class", NAMES[0], "--recall", "0.9", file) == 2
    assert "kway calibrate" in capsys.readouterr().err
    assert kway("query", bundle, "--class", NAMES[0], file) == 0
    assert "threshold" not in capsys.readouterr().out
