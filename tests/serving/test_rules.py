"""How requests and operators change what is decided: required promises, overridden thresholds, and
verdicts on the classes with the largest scores."""

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.answer import make_query, threshold_of
from serving.client import Client
from serving.config import ServingConfig
from serving.replica import checked
from tests.noise_images import image
from tests.serving.in_process import application, ask, listening, refusal
from tests.serving.published import ADDED, REMOVED, Published, serving
from tests.serving.started import index_gallery
from tests.tiny_bundle import NAMES, WAYS_TO_ASK, write, write_of_texts
from trainer.bundle.bundle import Bundle

TEXT = "a cat and a dog"
# What the bundle promises for recall 0.9 (`tests/tiny_bundle.py`).
SOURCES = ["guaranteed"] * 5 + ["shrunk", "pooled"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_of_texts(tmp_path_factory.mktemp("bundles") / "texts")


def query(bundle: Path, path: str = "/v1/query", limits: Any = None, **body: Any) -> httpx.Response:
    if path == "/v1/query":
        body = {"classes": list(WAYS_TO_ASK), **body}
    return ask(application(bundle, **limits or {}), "POST", path, json={"texts": [TEXT], **body})


# ---------------------------------------------------------------------------- required promises


@pytest.mark.parametrize("of_server", [False, True])
def test_a_class_without_the_required_promise_has_no_verdict(bundle: Path, of_server: bool) -> None:
    rule = {"recall": 0.9} if of_server else {"recall": 0.9, "require": "guaranteed"}
    limits = {"require": "guaranteed"} if of_server else {}
    answer = query(bundle, limits=limits, **rule).json()
    verdicts, thresholds = answer["results"][0]["verdicts"], answer["thresholds"]
    assert [found["threshold_source"] for found in thresholds] == SOURCES
    for found, verdict, source in zip(thresholds, verdicts, SOURCES, strict=True):
        is_kept = source == "guaranteed"
        assert (found["threshold"] is not None) == is_kept == (verdict["match"] is not None)
        assert (found["reason"] is None) == is_kept
        if not is_kept:
            assert source in found["reason"]
            assert found["pass_rate"] is None
            assert verdict["expected_precision"] is None


def test_a_required_promise_does_not_affect_scores_or_thresholds_of_requests(bundle: Path) -> None:
    limits = {"require": "guaranteed"}
    for rule in ({}, {"threshold": 0.5}):
        plain, required = (query(bundle, limits=found, **rule).json() for found in ({}, limits))
        assert plain == required


def test_a_required_promise_needs_a_recall(bundle: Path) -> None:
    for rule in ({}, {"threshold": 0.5}):
        answer = query(bundle, require="guaranteed", **rule)
        assert refusal(answer) == (422, "invalid_query")
    assert refusal(query(bundle, recall=0.9, require="pooled")) == (422, "invalid_query")


def test_tensors_cannot_express_a_missing_verdict(bundle: Path) -> None:
    api = application(bundle)
    texts = {"name": "texts", "datatype": "BYTES", "shape": [1], "data": [TEXT]}
    for class_id, status in ((0, 200), (5, 422)):
        ids = {"name": "class_ids", "datatype": "INT64", "shape": [1], "data": [class_id]}
        parameters = {"recall": 0.9, "require": "guaranteed"}
        body = {"inputs": [texts, ids], "parameters": parameters}
        answer = ask(api, "POST", "/v2/models/texts/infer", json=body)
        assert answer.status_code == status
    assert "shrunk" in answer.json()["error"]
    body["parameters"]["require"] = "pooled"
    assert ask(api, "POST", "/v2/models/texts/infer", json=body).status_code == 400


def test_a_search_for_a_class_without_the_required_promise_has_no_hits(tmp_path: Path) -> None:
    bundle, lines = write_of_texts(tmp_path / "texts"), tmp_path / "lines.txt"
    lines.write_text("a cat\na dog\nund hund\n")
    index_gallery(bundle, lines, "-o", tmp_path / "gallery")
    api = application(bundle, galleries={"lines": str(tmp_path / "gallery")})
    body = {"classes": ["#5"], "recall": 0.9, "require": "guaranteed"}
    (found,) = ask(api, "POST", "/v1/galleries/lines/search", json=body).json()["results"]
    assert (found["total"], found["hits"], found["threshold"]) == (0, [], None)
    assert "shrunk" in found["reason"]
    with listening(api) as url, Client(url) as client:
        (found,) = client.search_page("lines", [5], recall=0.9, require="guaranteed").results
        assert found.hits == []


# ---------------------------------------------------------------------------- overridden thresholds


@pytest.fixture
def thresholds(tmp_path: Path) -> Path:
    return tmp_path / "thresholds.csv"


@pytest.fixture
def served(tmp_path: Path, thresholds: Path) -> Iterator[Published]:
    thresholds.write_text(f'class,threshold\n{REMOVED},-7.5\n\n"#0",100\n')
    with serving(tmp_path, thresholds=thresholds) as published:
        yield published


def decided(served: Published, *names: str, **rule: Any) -> list[tuple[float | None, str | None]]:
    with served.client() as client:
        answer = client.query(names, [TEXT], **rule)
    verdicts = answer.results[0].verdicts
    assert [one.match for one in verdicts] == [
        None if one.threshold is None else one.score >= one.threshold for one in verdicts
    ]
    return [(one.threshold, one.threshold_source) for one in verdicts]


def test_an_operator_overrides_thresholds_of_single_classes(served: Published) -> None:
    names = (REMOVED, "husky", "malamute")
    overridden = [(-7.5, "override"), (100, "override"), (1, "guaranteed")]
    assert decided(served, *names, recall=0.9) == overridden
    assert decided(served, *names, recall=0.99) == overridden
    assert decided(served, *names, threshold=3) == [(3, "request")] * 3
    assert decided(served, *names) == [(None, None)] * 3
    required = [(None, "override"), (None, "override"), (1, "guaranteed")]
    assert decided(served, *names, recall=0.9, require="guaranteed") == required


def test_changed_overrides_take_effect_and_invalid_ones_do_not(
    served: Published, thresholds: Path
) -> None:
    assert decided(served, "husky", recall=0.9) == [(100, "override")]
    thresholds.write_text("class,threshold\nhusky,5\n")
    served.model.poll()
    assert decided(served, "husky", REMOVED, recall=0.9) == [(5, "override"), (2, "guaranteed")]
    thresholds.write_text("class,threshold\nhusky,high\n")
    served.model.poll()
    assert decided(served, "husky", recall=0.9) == [(5, "override")]
    assert served.reloads == ["switched", "failed"]
    thresholds.write_text("class,threshold\n")
    served.model.poll()
    assert decided(served, "husky", recall=0.9) == [(0, "guaranteed")]
    assert served.reloads == ["switched", "failed", "switched"]
    assert not served.model.is_rejected


def test_a_version_without_an_overridden_class_is_not_served(
    served: Published, thresholds: Path
) -> None:
    served.publish(served.versions[1])
    assert served.reloads == ["failed"]
    assert decided(served, REMOVED, recall=0.9) == [(-7.5, "override")]
    thresholds.write_text(f"class,threshold\n{ADDED},1.5\n")
    served.model.poll()
    assert served.reloads == ["failed", "switched"]
    assert decided(served, ADDED, recall=0.9) == [(1.5, "override")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "first line is not class,threshold"),
        ("husky,1\n", "first line is not class,threshold"),
        ("class,threshold\nhusky\n", "line 2: 1 columns instead of 2"),
        ("class,threshold\nhusky,x\n", "line 2: could not convert"),
        ("class,threshold\nhusky,nan\n", "line 2: threshold nan is not a finite number"),
        ("class,threshold\n\npoodle,1\n", "line 3: there is no class 'poodle'"),
        ("class,threshold\nhusky,1\n#0,2\n", "line 3: class '#0' occurs twice"),
        ('class,threshold\n"husky,1\n', "unexpected end of data"),
    ],
)
def test_invalid_thresholds_are_reported_with_their_line(
    bundle: Path, thresholds: Path, content: str, message: str
) -> None:
    thresholds.write_text(content)
    with pytest.raises(ValueError, match=f"thresholds {thresholds}: .*{message}"):
        checked(bundle, ServingConfig(thresholds=thresholds), verify=False, on_this_machine=True)


def test_a_bundle_without_thresholds_answers_for_overridden_classes(tmp_path: Path) -> None:
    path = write(tmp_path / "pets", changes={"recalls": []}, measured=None)
    overrides = {0: 0.5}
    with Bundle.open(path) as opened:
        query = make_query(opened, ["husky"], recall=0.8, overrides=overrides)
        found = threshold_of(opened, 0, query)
        assert (found.threshold, found.threshold_source) == (0.5, "override")
        with pytest.raises(ValueError, match="no thresholds"):
            make_query(opened, ["husky", "samoyed"], recall=0.8, overrides=overrides)


def test_a_bundle_without_thresholds_returns_scores_and_verdicts_for_a_threshold(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "imported", changes={"recalls": []}, measured=None)
    body = {"classes": list(NAMES[:2]), "images": [b64encode(image(0)).decode()]}

    def decide(**rule: float) -> httpx.Response:
        return ask(application(path), "POST", "/v1/query", json={**body, **rule})

    scores, rejected = decide().json(), decide(recall=0.9)
    verdicts = scores["results"][0]["verdicts"]
    assert scores["thresholds"] == []
    assert {(one["threshold"], one["match"]) for one in verdicts} == {(None, None)}
    decided = decide(threshold=verdicts[0]["score"]).json()
    assert decided["results"][0]["verdicts"][0]["match"]
    assert {one["threshold_source"] for one in decided["thresholds"]} == {"request"}
    assert "kway calibrate" in rejected.json()["error"]["message"]


def test_a_missing_file_of_thresholds_is_reported(bundle: Path, thresholds: Path) -> None:
    with pytest.raises(OSError, match=r"thresholds\.csv cannot be read"):
        checked(bundle, ServingConfig(thresholds=thresholds), verify=False, on_this_machine=True)


# ---------------------------------------------------------------------------- what is this?


def test_the_top_classes_have_the_verdicts_of_a_query(bundle: Path) -> None:
    for rule in ({"recall": 0.9}, {"recall": 0.9, "require": "guaranteed"}, {"threshold": 1.0}, {}):
        top = query(bundle, "/v1/classify", top=len(NAMES), **rule).json()["results"][0]["classes"]
        asked = query(bundle, **rule).json()["results"][0]["verdicts"]
        by_id = {one["class_id"]: one for one in asked}
        scores = [one["score"] for one in top]
        assert scores == sorted(scores, reverse=True)
        assert len(top) == len(asked)
        for one in top:  # the rounding of a score depends on the number of classes
            assert one == by_id[one["class_id"]] | {"score": pytest.approx(one["score"], abs=1e-4)}
