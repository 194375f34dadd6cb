"""New versions of bundles and galleries replace the old ones while the server answers requests."""

import asyncio
import gc
import json
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tritonclient.grpc import service_pb2 as pb
from typer.testing import CliRunner

from data.files import sha256_of
from launch.commands.index import index as index_command
from serving.client import Client, RejectedError
from serving.config import ServingConfig
from serving.inference.methods import InferenceMethods
from serving.models.loading import Loader
from serving.models.models import Version
from serving.models.published import Attempts, LastServed, LastServedFiles, paths_of_models
from serving.models.reloading import Reloader
from serving.schemas import Answer
from serving.tokens import Clients
from serving.watches.board import Board
from tests.serving import in_process
from tests.serving.in_process import no_metrics
from tests.serving.live.servers import write_tokens
from tests.serving.published import (
    ADDED,
    ADMIN,
    QUESTIONS,
    REMOVED,
    Counts,
    Expected,
    Published,
    publish,
    serving,
    write_versions,
)
from tests.serving.test_api_access import Call
from tests.serving.watching import create_watch, eventually, feeding
from tests.tiny_bundle import write, write_of_texts
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import read_manifest

TOKEN = "c" * 32


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

    with ThreadPoolExecutor(4) as threads, served.client(ADMIN) as admin:
        asking = [threads.submit(ask) for _ in range(4)]
        for number in range(6):
            publish(served.versions[(number + 1) % 2], served.path)
            (result,) = admin.reload()
            assert result.outcome == "switched"
            assert result.version == expected.versions[(number + 1) % 2]
        is_over.set()
        seen = [each.result(60) for each in asking]
    assert problems == []
    assert set.union(*seen) == set(expected.versions)
    assert served.counts.reloads == [("pets", "switched")] * 6


def test_a_version_published_at_the_path_is_noticed(served: Published) -> None:
    first, second = Expected(served.versions).versions
    assert version_of(served) == first
    served.reloader.poll()
    assert version_of(served) == first
    publish(served.versions[1], served.path)
    served.reloader.poll()
    assert version_of(served) == second


def test_a_folder_that_is_renamed_to_the_path_is_noticed(served: Published) -> None:
    served.path.unlink()
    served.reloader.poll()  # the path does not exist for a moment
    served.versions[1].rename(served.path)
    second = Bundle.open(served.path).version
    assert version_of(served) != second
    served.reloader.poll()
    assert version_of(served) == second
    shutil.rmtree(served.path)  # a version needs no files after it was loaded
    with served.client() as client:
        assert len(client.query(["husky"], ["a cat"], recall=0.9).results) == 1
        assert client.classes("husky").total == 1


def test_the_old_version_answers_its_requests_and_is_then_freed(served: Published) -> None:
    model = served.reloader.models.default
    first = model.current.id
    old_model = weakref.ref(model.current.service.model)
    # It is part of a reference cycle.
    old_classes = weakref.ref(model.current.service.model.bundle.classes)
    body = json.dumps({"text": "a cat"}) + "\n"
    gc.collect()
    gc.freeze()
    sent = threading.Event()

    def lines() -> Iterator[bytes]:
        yield body.encode()
        sent.wait(60)
        yield body.encode()

    headers = {"content-type": "application/x-ndjson"}
    path = "/v1/query:stream?classes=husky"
    try:
        with ThreadPoolExecutor(1) as threads, served.http() as http:
            streaming = threads.submit(http.post, path, content=lines(), headers=headers)
            eventually(lambda: served.reloader.models.state().requests == 1)
            publish(served.versions[1], served.path)
            served.reloader.poll()
            assert version_of(served) == model.current.id != first
            served.reloader.poll()
            assert old_model() is not None
            sent.set()
            response = streaming.result(60)
        assert response.headers["kway-model-version"] == first
        scores = [
            json.loads(line)["verdicts"][0]["score"] for line in response.text.splitlines()[:2]
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)
        eventually(lambda: old_model() is None)
        served.reloader.poll()
        assert old_classes() is None
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_listeners_and_feeds_do_not_keep_an_old_version(served: Published) -> None:
    model = served.reloader.models.default
    old = weakref.ref(model.current.service)
    with served.http() as http:
        watch = create_watch(http)
        with (
            http.stream("GET", f"/v1/watches/{watch['id']}/hits") as listening,
            feeding(served.url, "/v1/feeds/door?acknowledge=true") as feed,
        ):
            hits = listening.iter_lines()
            next(hits)
            feed.send(b'{"text": "a cat", "id": 1}\n')
            found = [feed.line(), feed.line()]
            assert found[0] is not None
            assert (found[0]["version"], found[0]["class_id"]) == (model.current.id, 0)
            publish(served.versions[1], served.path)
            served.reloader.poll()
            feed.send(b'{"text": "a cat", "id": 2}\n')
            found = [feed.line(), feed.line()]
            assert found[0] is not None
            # The class is found by its name.
            assert (found[0]["version"], found[0]["class_id"]) == (model.current.id, 6)
            assert [json.loads(next(hits))["frame"] for _ in range(2)] == [1, 2]
            eventually(lambda: old() is None)


@pytest.mark.slow
def test_a_watch_reports_a_class_that_the_new_version_does_not_have(
    served: Published, caplog: pytest.LogCaptureFixture
) -> None:
    with served.http() as http:
        watch = create_watch(http, classes=[REMOVED, "husky"])
        assert watch["missing_classes"] == []
        publish(served.versions[1], served.path)
        served.reloader.poll()
        (found,) = http.get("/v1/watches").json()["watches"]
        assert found["missing_classes"] == [REMOVED]
        assert [(one["class"], one["class_id"]) for one in found["classes"]] == [("husky", 6)]
        with feeding(served.url, "/v1/feeds/door?acknowledge=true") as feed:
            feed.send(b'{"text": "a cat", "id": 1}\n')
            lines = [feed.line(), feed.line()]
        assert [line and line.get("class") for line in lines] == ["husky", None]
        assert f"watch {watch['id']} ignores class '{REMOVED}'" in caplog.text
        publish(served.versions[0], served.path)
        served.reloader.poll()
        (found,) = http.get("/v1/watches").json()["watches"]
        assert found["missing_classes"] == []
        response = http.post("/v1/query", json={"classes": [ADDED], "texts": ["a cat"]})
        assert response.status_code == 404


def test_a_version_that_is_published_while_another_one_is_being_loaded_is_served(
    tmp_path: Path,
) -> None:
    versions, path = write_versions(tmp_path), tmp_path / "pets"
    publish(versions[0], path)

    class Interrupted(Loader):
        """Publishes the first version again after the second one has been loaded."""

        def successor(self, name: str, current: Version) -> Version:
            version = super().successor(name, current)
            if version is not current:
                publish(versions[0], path)
            return version

    config = ServingConfig(threads=1)
    paths, changes = paths_of_models(path, config), Board(config).galleries
    reloader = Reloader(Interrupted(paths, config, Counts(), changes), Counts())
    publish(versions[1], path)
    (result,) = reloader.reload()
    assert (result.outcome, result.version) == ("unchanged", result.previous)


# ---------------------------------------------------------------------------- galleries


def build_gallery(bundle: Path, texts: list[str], gallery: Path) -> Path:
    lines = gallery.with_name("lines.txt")
    lines.write_text("\n".join(texts) + "\n")
    app = typer.Typer()
    app.command()(index_command)
    result = CliRunner().invoke(app, [str(bundle), str(lines), "-o", str(gallery)])
    assert result.exception is None, result.output
    return gallery


@pytest.fixture
def with_gallery(tmp_path: Path) -> Iterator[Published]:
    bundle = write_of_texts(tmp_path / "first")
    gallery = build_gallery(bundle, ["a cat", "a dog"], tmp_path / "texts")
    with serving(tmp_path, galleries={"texts": gallery}) as published:
        yield published


def test_a_gallery_that_is_indexed_again_is_noticed(with_gallery: Published) -> None:
    served = with_gallery
    service = served.reloader.models.default.current.service
    with served.client() as client:
        assert len(client.search_page("texts", ["husky"]).results[0].hits) == 2
        gallery = served.path.with_name("texts")
        build_gallery(served.path, ["a cat", "a dog", "猫"], gallery)
        served.reloader.poll()
        found = client.search_page("texts", ["husky"])
        assert len(found.results[0].hits) == found.num_items == 3
        assert served.reloader.models.default.current.service is service  # not loaded again
        other = gallery.with_name("other")
        shutil.copytree(gallery, other)
        info = json.loads((other / "gallery.json").read_text())
        info["files"]["features.safetensors"]["sha256"] = "0" * 64
        (other / "gallery.json").write_text(json.dumps(info))
        shutil.rmtree(gallery)
        other.rename(gallery)
        with served.client(ADMIN) as admin, pytest.raises(RejectedError, match="checksum"):
            admin.reload()
        assert client.search_page("texts", ["husky"]) == found


def test_a_gallery_is_searched_with_the_classes_of_the_version_that_the_answer_names(
    with_gallery: Published,
) -> None:
    served, found = with_gallery, {}
    with served.client() as client:
        for version in served.versions:
            publish(version, served.path)
            served.reloader.poll()
            page = client.search_page("texts", ["husky"])
            (score,) = [hit.score for hit in page.results[0].hits if hit.text == "a cat"]
            query = client.query(["husky"], ["a cat"])
            assert page.version == query.version
            assert score == pytest.approx(query.results[0].verdicts[0].score, abs=1e-4)
            found[page.version] = score
    assert len(set(found.values())) == 2


def test_a_bundle_with_another_backbone_is_rejected_while_its_gallery_is_not_published(
    with_gallery: Published, tmp_path: Path
) -> None:
    served = with_gallery
    other = write_of_texts(tmp_path / "other", extra_bytes=64_000)
    publish(other, served.path)
    with served.client(ADMIN) as admin, served.client() as client:
        with pytest.raises(RejectedError, match="different backbone"):
            admin.reload()
        shutil.rmtree(tmp_path / "texts")
        build_gallery(other, ["a dog"], tmp_path / "texts")
        (result,) = admin.reload()
        assert result.outcome == "switched"
        found = client.search_page("texts", ["husky"])
        assert (found.version, found.num_items) == (result.version, 1)


# ---------------------------------------------------------------------------- damaged versions


def truncated(folder: Path) -> str:
    file = folder / "class_weights.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    return "bytes instead of"


def mixed(folder: Path) -> str:
    """The weights of the other version, which have the same size."""
    shutil.copy(folder.with_name("v1") / "class_weights.safetensors", folder)
    return "does not match its checksum"


def incomplete(folder: Path) -> str:
    (folder / "backbone.safetensors").unlink()
    return "backbone.safetensors is missing"


def empty(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "is not a bundle"


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


@pytest.mark.parametrize("damage", [truncated, mixed, incomplete, empty, diverged])
def test_a_damaged_version_is_reported_and_the_old_one_continues_to_serve(
    served: Published, damage, caplog: pytest.LogCaptureFixture
) -> None:
    before = version_of(served)
    reason = damage(served.versions[1])
    publish(served.versions[1], served.path)
    with served.client(ADMIN) as admin, pytest.raises(RejectedError, match=reason) as caught:
        admin.reload()
    assert (caught.value.status, caught.value.code) == (409, "reload_failed")
    assert f"Version {before} continues to serve" in caught.value.reason
    served.reloader.poll()
    assert version_of(served) == before
    assert served.counts.reloads == [("pets", "failed")]
    assert served.reloader.models.default.is_rejected
    messages = [record.getMessage() for record in caplog.records if record.name == "kway.models"]
    assert len(messages) == 1
    assert reason in messages[0]


def test_a_version_that_reads_another_kind_of_input_is_rejected(
    served: Published, tmp_path: Path
) -> None:
    publish(write(tmp_path / "images"), served.path)
    with served.client(ADMIN) as admin, pytest.raises(RejectedError, match="reads images"):
        admin.reload()


def test_a_bundle_that_is_copied_to_the_path_is_served_once_it_is_complete(
    served: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.models.reloading._RETRY_SECONDS", 0.0)
    before = version_of(served)
    served.path.unlink()
    files = sorted(file for file in served.versions[1].rglob("*") if file.is_file())
    for file in files:
        assert version_of(served) == before
        target = served.path / file.relative_to(served.versions[1])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes()[:-1])
        served.reloader.poll()
        is_published = (served.path / "bundle.json").exists()
        assert served.reloader.models.default.is_rejected == is_published
        target.write_bytes(file.read_bytes())
        served.reloader.poll()
    assert version_of(served) == Expected(served.versions).versions[1]
    assert served.counts.reloads[-1] == ("pets", "switched")
    assert [one.is_rejected for one in served.reloader.models.state().models] == [False]


def test_a_replica_that_starts_while_the_version_is_damaged_serves_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = write_versions(tmp_path)
    path, state = tmp_path / "pets", tmp_path / "state"
    state.mkdir()
    publish(first, path)
    config, counts = ServingConfig(threads=1, state=state), Counts()

    def start() -> Reloader:
        loader = Loader(paths_of_models(path, config), config, counts, Board(config).galleries)
        return Reloader(loader, counts)

    served = start().models.default.current.id
    assert LastServedFiles(state).read("pets") == LastServed(folder=first, version=served)
    truncated(second)
    publish(second, path)
    later = start()
    assert later.models.default.current.id == served
    assert "is served instead" in caplog.text
    later.poll()  # reports it, too, and counts it
    assert counts.reloads == [("pets", "failed")]
    shutil.rmtree(first)
    with pytest.raises(ValueError, match="bytes instead of"):
        start()


def killed_while_loading(state: Path, version: str) -> None:
    """Run a process that is killed while it loads a version."""
    child = os.fork()
    if child == 0:
        with Attempts(state).attempt("pets", version):
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_a_version_that_kills_the_replicas_which_load_it_is_rejected(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with serving(tmp_path, state=state) as served:
        first, second = Expected(served.versions).versions
        for _ in range(3):
            killed_while_loading(state, second)
        publish(served.versions[1], served.path)
        served.reloader.poll()
        assert version_of(served) == first
        assert served.counts.reloads == [("pets", "failed")]
        with served.client(ADMIN) as admin:  # an administrator can try again
            (result,) = admin.reload()
        assert result.version == second


def test_the_kill_of_a_replica_that_loads_a_version_does_not_prevent_others_from_loading_it(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with serving(tmp_path, state=state) as served:
        _, second = Expected(served.versions).versions
        for _ in range(2):
            killed_while_loading(state, second)
        for _ in range(2):
            for version in (1, 0):
                publish(served.versions[version], served.path)
                served.reloader.poll()
        publish(served.versions[1], served.path)
        served.reloader.poll()
        assert version_of(served) == second
    assert served.counts.reloads == [("pets", "switched")] * 5


def test_replicas_load_new_versions_one_at_a_time(tmp_path: Path) -> None:
    started = threading.Event()

    def load() -> None:
        with Attempts(tmp_path).attempt("pets", "2"):
            started.set()

    with Attempts(tmp_path).attempt("pets", "1"):
        thread = threading.Thread(target=load)
        thread.start()
        assert not started.wait(0.3)
    assert started.wait(60)
    thread.join(60)


# ---------------------------------------------------------------------------- administrators


def test_only_administrators_can_reload(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    write_tokens(tokens, TOKEN)
    with serving(tmp_path, token_file=tokens) as served, served.http() as http:
        admin = {"authorization": f"Bearer {ADMIN}"}
        client = {"authorization": f"Bearer {TOKEN}"}
        assert http.post("/v1/admin/reload", headers=admin).status_code == 200
        for path, headers in (
            ("/v1/admin/reload", {}),
            ("/v1/admin/reload", client),
            ("/v1/models/pets/admin/reload", client),
            ("/v1/models/pets/admin/reload", admin),
        ):
            response = http.post(path, headers=headers)
            assert response.status_code == 401, (path, headers)
        assert http.get("/v1/model", headers=admin).status_code == 401


def test_without_administrators_nobody_can_reload(tmp_path: Path) -> None:
    api = in_process.application(write_of_texts(tmp_path / "pets"))
    for headers in ({}, {"authorization": f"Bearer {ADMIN}"}):
        answer = in_process.ask(api, "POST", "/v1/admin/reload", headers=headers)
        assert in_process.refusal(answer) == (403, "no_admin")


# ---------------------------------------------------------------------------- several models


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Published]:
    """The default model is `pets`. The model `others` is always the second version."""
    with serving(tmp_path, models={"others": tmp_path / "v2"}) as published:
        yield published


def test_each_model_has_its_own_routes(several: Published) -> None:
    first, second = Expected(several.versions).versions
    with several.client() as client:
        models = client.models()
    assert [(one.name, one.version, one.is_default) for one in models] == [
        ("pets", first, True),
        ("others", second, False),
    ]
    for name, version, husky in ((None, first, 0), ("pets", first, 0), ("others", second, 6)):
        with Client(several.url, model=name) as client:
            answer = client.query(["husky"], ["a cat"], recall=0.9)
            assert (answer.version, answer.thresholds[0].class_id) == (version, husky)
            assert client.classify(["a cat"]).version == version
            assert client.classes("husky").classes[0].id == husky
            assert client.galleries() == []
            hit, _ = client.stream(["husky"], ["a cat"], all=True)
            assert hit.verdicts[0].class_id == husky
    with several.http() as http:
        info = http.get("/v1/models/others").json()
        assert (info["name"], info["version"]) == ("others", second)
        assert http.get("/v1/models/others/model").json() == info
        for path in ("/v1/models/x", "/v1/models/x/query"):
            assert in_process.refusal(http.get(path)) == (404, "unknown_model")


@pytest.mark.slow
def test_the_open_inference_protocol_selects_the_model_by_its_name(several: Published) -> None:
    inputs = [
        {"name": "texts", "datatype": "BYTES", "shape": [1], "data": ["a cat"]},
        {"name": "classes", "datatype": "BYTES", "shape": [1], "data": ["husky"]},
    ]
    with several.http() as http:
        for name in ("pets", "others"):
            answer = http.post(f"/v2/models/{name}/infer", json={"inputs": inputs})
            with Client(several.url, model=name) as client:
                expected = client.query(["husky"], ["a cat"])
            (scores,) = answer.json()["outputs"]
            assert answer.json()["model_name"] == name
            assert scores["data"][0] == pytest.approx(
                expected.results[0].verdicts[0].score, abs=1e-4
            )
            assert answer.headers["kway-model-version"] == expected.version
        assert http.get("/v2/models/x").status_code == 404


@pytest.mark.slow
def test_grpc_selects_the_model_by_its_name_and_returns_its_version(several: Published) -> None:
    methods = InferenceMethods(several.reloader.models, Clients(None), no_metrics)
    for name, version in (("pets", 0), ("others", 1)):
        request = pb.ModelInferRequest(model_name=name)
        for tensor, values in (("texts", [b"a cat"]), ("classes", [b"husky"])):
            sent = request.inputs.add(name=tensor, datatype="BYTES", shape=[1])
            sent.contents.bytes_contents.extend(values)
        call = Call({})
        response = asyncio.run(methods.call("ModelInfer", request.SerializeToString(), call))
        assert call.code is None
        assert response.model_name == name
        assert response.model_version == Expected(several.versions).versions[version]
    call, request = Call({}), pb.ModelReadyRequest(name="x")
    asyncio.run(methods.call("ModelReady", request.SerializeToString(), call))
    assert call.code is grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
def test_watches_and_feeds_of_one_model_are_not_those_of_another(several: Published) -> None:
    with Client(several.url) as pets, Client(several.url, model="others") as others:
        mine = pets.create_watch(["husky"], threshold=-1e6, ttl_seconds=60)
        theirs = others.create_watch(["husky"], threshold=-1e6, ttl_seconds=60)
        assert [one.id for one in pets.watches()] == [mine.id]
        assert [one.id for one in others.watches()] == [theirs.id]
        with pytest.raises(RejectedError, match="does not exist"):
            pets.delete_watch(theirs.id)
        for client, watch, class_id in ((pets, mine, 0), (others, theirs, 6)):
            hit, _ = client.feed("door", ["a cat"])
            assert (hit.watch, hit.class_id) == (watch.id, class_id)
        assert pets.feed_position("door") == others.feed_position("door") == 0
        others.delete_watch(theirs.id)
        assert len(list(others.feed("door", ["a cat"]))) == 1


@pytest.mark.slow
def test_models_are_swapped_independently(several: Published) -> None:
    publish(several.versions[1], several.path)
    with several.client(ADMIN) as admin:
        outcomes = {one.name: one.outcome for one in admin.reload()}
        assert outcomes == {"pets": "switched", "others": "unchanged"}
        versions = {one.version for one in admin.models()}
    assert len(versions) == 1


def test_two_models_cannot_have_the_same_name(tmp_path: Path) -> None:
    config = ServingConfig(models={"pets": tmp_path / "other"})
    with pytest.raises(ValueError, match="--model pets="):
        paths_of_models(tmp_path / "pets", config)
