"""New versions of bundles and galleries replace the old ones while the server answers requests."""

import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data.files import sha256_of
from serving.config import ServingConfig
from serving.metrics import RELOADS, Metrics
from serving.model import Model
from serving.schemas import Answer
from serving.versions import ServedModel, Version
from tests.serving.in_process import Recorder, refusal
from tests.serving.published import (
    QUESTIONS,
    Expected,
    Published,
    publish,
    serving,
    write_versions,
)
from tests.serving.started import index_gallery
from tests.tiny_bundle import write, write_of_texts
from tests.waiting import wait_until
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import read_manifest


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Published]:
    with serving(tmp_path) as published:
        yield published


def version_of(served: Published) -> str | None:
    with served.client() as client:
        return client.query(["husky"], ["a cat"]).version


# ---------------------------------------------------------------------------- swaps


def test_each_answer_during_swaps_is_that_of_the_version_which_it_names(served: Published) -> None:
    expected, is_over = Expected(served.versions), threading.Event()
    problems: list[str] = []

    def ask() -> set[str | None]:
        seen = set()
        with served.http() as http:
            while not is_over.is_set():
                for question in QUESTIONS:
                    response = http.post("/v1/query", json=question.body)
                    assert response.status_code == 200, response.text
                    answer = Answer.model_validate_json(response.content)
                    header = response.headers["kway-model-version"]
                    problem = expected.problem(question, answer, header)
                    seen.add(answer.version)
                    if problem is not None:
                        problems.append(problem)
        return seen

    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(ask) for _ in range(4)]
        for number in range(6):
            served.publish(served.versions[(number + 1) % 2])
            assert served.model.current.service.version == expected.versions[(number + 1) % 2]
        is_over.set()
        seen = [each.result(60) for each in asking]
    assert problems == []
    assert set.union(*seen) == set(expected.versions)
    assert served.reloads == ["switched"] * 6


def test_a_folder_that_is_renamed_to_the_path_is_noticed(served: Published) -> None:
    served.path.unlink()
    served.model.poll()  # the path does not exist for a moment
    served.versions[1].rename(served.path)
    second = Bundle.open(served.path).version
    assert version_of(served) != second
    served.model.poll()
    assert version_of(served) == second
    shutil.rmtree(served.path)  # a version needs no files after it was loaded
    with served.client() as client:
        assert len(client.query(["husky"], ["a cat"], recall=0.9).results) == 1
        assert client.classes("husky").total == 1


def test_the_old_version_answers_its_requests_and_is_then_freed(
    served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served.model
    first = model.current.service.version
    old_model = weakref.ref(model.current.service.model)
    # It is part of a reference cycle.
    old_classes = weakref.ref(model.current.service.model.bundle.classes)
    started, may_end = threading.Event(), threading.Event()
    prepare = Model.prepare

    def slow(self: Model, raw: Any) -> Any:
        if raw == "a slow cat":
            started.set()
            may_end.wait(60)
        return prepare(self, raw)

    monkeypatch.setattr(Model, "prepare", slow)
    body = {"classes": ["husky"], "texts": ["a slow cat"]}
    with ThreadPoolExecutor(1) as threads, served.http() as http:
        asking = threads.submit(http.post, "/v1/query", json=body)
        assert started.wait(60)
        served.publish(served.versions[1])
        assert version_of(served) == model.current.service.version != first
        served.model.poll()
        assert old_model() is not None
        may_end.set()
        response = asking.result(60)
    assert response.headers["kway-model-version"] == response.json()["version"] == first
    wait_until(lambda: old_model() is None)
    served.model.poll()
    wait_until(lambda: old_classes() is None, 10)  # the server's own poll may be collecting it


def test_a_version_that_is_published_while_another_one_is_being_loaded_is_served(
    tmp_path: Path,
) -> None:
    versions, path = write_versions(tmp_path), tmp_path / "pets"
    publish(versions[0], path)

    class Interrupted(ServedModel):
        """Publishes the first version again after the second one has been loaded."""

        def _load(self, previous: Version | None) -> Version:
            version = super()._load(previous)
            publish(versions[0], path)
            return version

    recorder = Recorder()
    model = Interrupted(path, ServingConfig(threads=1), Metrics(recorder))
    first = model.current.service.version
    publish(versions[1], path)
    model.poll()
    model.poll()
    assert model.current.service.version == first
    assert [labels["outcome"] for labels in recorder.labels_of(RELOADS)] == ["switched"] * 2


# ---------------------------------------------------------------------------- galleries


def build_gallery(bundle: Path, texts: list[str], gallery: Path) -> Path:
    lines = gallery.with_name("lines.txt")
    lines.write_text("\n".join(texts) + "\n")
    index_gallery(bundle, lines, "-o", gallery)
    return gallery


@pytest.fixture
def with_gallery(tmp_path: Path) -> Iterator[Published]:
    bundle = write_of_texts(tmp_path / "first")
    gallery = build_gallery(bundle, ["a cat", "a dog"], tmp_path / "texts")
    with serving(tmp_path, galleries={"texts": gallery}) as published:
        yield published


def test_a_gallery_that_is_indexed_again_is_noticed(
    with_gallery: Published, caplog: pytest.LogCaptureFixture
) -> None:
    served = with_gallery
    service = served.model.current.service
    with served.client() as client:
        assert len(client.search_page("texts", ["husky"]).results[0].hits) == 2
        gallery = served.path.with_name("texts")
        build_gallery(served.path, ["a cat", "a dog", "猫"], gallery)
        served.model.poll()
        found = client.search_page("texts", ["husky"])
        assert len(found.results[0].hits) == found.num_items == 3
        assert served.model.current.service is service  # not loaded again
        other = gallery.with_name("other")
        shutil.copytree(gallery, other)
        info = json.loads((other / "gallery.json").read_text())
        info["files"]["features.safetensors"]["sha256"] = "0" * 64
        (other / "gallery.json").write_text(json.dumps(info))
        shutil.rmtree(gallery)
        other.rename(gallery)
        served.model.poll()
        assert "checksum" in caplog.text
        assert client.search_page("texts", ["husky"]) == found


def test_a_gallery_is_searched_with_the_classes_of_the_version_that_the_answer_names(
    with_gallery: Published,
) -> None:
    served, found = with_gallery, {}
    with served.client() as client:
        for version in served.versions:
            served.publish(version)
            page = client.search_page("texts", ["husky"])
            (score,) = [hit.score for hit in page.results[0].hits if hit.text == "a cat"]
            query = client.query(["husky"], ["a cat"])
            assert page.version == query.version
            assert score == pytest.approx(query.results[0].verdicts[0].score, abs=1e-4)
            found[page.version] = score
    assert len(set(found.values())) == 2


def test_a_gallery_of_another_backbone_is_unavailable_and_no_obstacle_to_a_start(
    with_gallery: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served, gallery = with_gallery, tmp_path / "texts"
    other = write_of_texts(tmp_path / "other", extra_bytes=64_000)
    served.publish(other)
    assert "gallery texts is unavailable" in caplog.text
    assert version_of(served) == Bundle.open(other).version
    with serving(tmp_path / "started", other, galleries={"texts": gallery}) as started:
        for each in (served, started):
            with each.http() as http:
                (listed,) = http.get("/v1/galleries").json()["galleries"]
                assert "different backbone" in listed["unavailable"]
                for found in (
                    http.post("/v1/galleries/texts/search", json={"classes": ["husky"]}),
                    http.get("/v1/galleries/texts/items/0/thumbnail"),
                ):
                    assert refusal(found) == (503, "gallery_unavailable")
        shutil.rmtree(gallery)
        build_gallery(other, ["a dog"], gallery)
        for each in (served, started):
            each.model.poll()
            with each.client() as client:
                page = client.search_page("texts", ["husky"])
                assert (page.version, page.num_items) == (Bundle.open(other).version, 1)
                assert client.galleries()[0].unavailable is None


# ---------------------------------------------------------------------------- damaged versions


def mixed(folder: Path) -> str:
    """The weights of the other version, which have the same size."""
    shutil.copy(folder.with_name("v1") / "class_weights.safetensors", folder)
    return "does not match its checksum"


def diverged(folder: Path) -> str:
    file = folder / "backbone.safetensors"
    save_file(
        {name: torch.full_like(one, torch.nan) for name, one in load_file(file).items()}, file
    )
    manifest = read_manifest(folder)
    described = manifest.files[file.name].model_copy(update={"sha256": sha256_of(file)})
    files = manifest.files | {file.name: described}
    renewed = manifest.model_copy(update={"files": files})
    (folder / "bundle.json").write_text(renewed.model_dump_json())
    return "returns a score of nan"


@pytest.mark.parametrize("damage", [mixed, diverged])
def test_a_damaged_version_is_reported_and_the_old_one_continues_to_serve(
    served: Published,
    damage: Callable[[Path], str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = version_of(served)
    reason = damage(served.versions[1])
    monkeypatch.setattr("serving.versions._RETRY_SECONDS", 0.0)
    for _ in range(2):
        served.publish(served.versions[1])
        assert version_of(served) == before
    assert served.reloads == ["failed"]
    assert served.model.is_rejected
    messages = [record.getMessage() for record in caplog.records if record.name == "kway.models"]
    assert len(messages) == 1
    assert reason in messages[0]
    assert f"Version {before} continues to serve" in messages[0]


def test_a_version_that_reads_another_kind_of_input_is_rejected(
    served: Published, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = version_of(served)
    served.publish(write(tmp_path / "images"))
    assert "reads images, but the model reads texts" in caplog.text
    assert version_of(served) == before


def test_a_bundle_that_is_copied_to_the_path_is_served_once_it_is_complete(
    served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.versions._RETRY_SECONDS", 0.0)
    before = version_of(served)
    served.path.unlink()
    files = sorted(file for file in served.versions[1].rglob("*") if file.is_file())
    for file in files:
        assert version_of(served) == before
        target = served.path / file.relative_to(served.versions[1])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes()[:-1])
        served.model.poll()
        is_published = (served.path / "bundle.json").exists()
        assert served.model.is_rejected == is_published
        target.write_bytes(file.read_bytes())
        served.model.poll()
    assert version_of(served) == Expected(served.versions).versions[1]
    assert served.reloads[-1] == "switched"
    assert not served.model.is_rejected
