"""Cost of serving: `python -m benchmarks.serving [SECTION ...] [--markdown FILE]`.

All sections take about 15 minutes on two idle cores. FILE gets the table for the docs.

heads       the head of a query, for 2^10 to 2^24 classes
query       a complete query / computing all logits
gallery     exact search of a gallery / faiss
runners     CPU time of a query at each runner / the same model in a hand-written application
idle        processes and memory of idle servers

The servers that are compared use the same bundle and one torch thread: several threads would add
CPU time by spinning while they wait for each other. They take turns. The CPU time of a server
covers all of its processes, including those of Ray. The client runs on the same cores.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import cv2
import faiss
import httpx
import numpy as np
import psutil
import torch
from safetensors.torch import load_file

from benchmarks.timing import (
    CONSOLE,
    Row,
    Sections,
    command_line,
    rate_row,
    ratio_row,
    report,
    take_turns,
)
from data.classes.class_list import ClassInfo
from data.files import sha256_of
from data.images.config import ImageConfig
from heads.logit_maps import ClassRows, Dot
from serving.addresses import free_port
from serving.answer import answer, make_query
from serving.config import ServingConfig
from serving.galleries.searching import best, class_scores
from serving.model import Model, open_reader
from serving.on_ray import variables
from tests import noise_images
from tests.serving import started
from trainer.backbone.backbone import build_backbone
from trainer.backbone.config import BackboneConfig
from trainer.backbone.onnx_backbone import write_int8, write_onnx
from trainer.backbone.precision import LowPrecision
from trainer.bundle.bundle import Bundle
from trainer.bundle.class_list import write_classes
from trainer.bundle.row_file import header_of
from trainer.bundle.spec import (
    ONNX,
    SPEC,
    TENSOR,
    WEIGHTS,
    BundleSpec,
    LossSpec,
    RecallSpec,
)
from trainer.bundle.threshold_file import ClassThresholds
from trainer.bundle.writing import rewrite_bundle, write_bundle
from trainer.promises import KINDS

RESNET_50: dict[str, Any] = {"model_type": "resnet"}  # transformers' default
_BASIC = {**RESNET_50, "layer_type": "basic"}
RESNET_18 = {**_BASIC, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
DEMO = {
    **_BASIC,
    "embedding_size": 32,
    "hidden_sizes": [32, 64, 128, 256],
    "depths": [1, 1, 1, 1],
}
NEGLIGIBLE = {**_BASIC, "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}

_HEADS = tuple(1 << power for power in (10, 14, 18, 21, 24))
# Many short turns, so that other load on the machine affects all contenders equally.
_QUERIES, _ROUNDS, _NUM_ROWS = 100, 101, 1000
_NUM_ITEMS = 1_000_000
_MANY = 370_728  # 2^18.5, as in paper 002, table 3
# A JPEG with the typical size of ImageNet's images.
_PIXELS = np.random.default_rng(0).integers(0, 256, (47, 63, 3), dtype=np.uint8)
_LARGE = cv2.resize(_PIXELS, (500, 375), interpolation=cv2.INTER_CUBIC)
_IMAGE = cv2.imencode(".jpg", _LARGE)[1].tobytes()


def heads() -> Iterator[Row]:
    """Time the head of a query by number of classes."""
    with tempfile.TemporaryDirectory(prefix="kway-") as folder:
        path = Path(folder) / "small"
        write_random(path, RESNET_50, _NUM_ROWS + 24)
        # Measure the thread's CPU time: the thread never waits, and wall time would depend on the
        # machine's load.
        found = take_turns(
            {str(num_classes): _head(path, num_classes) for num_classes in _HEADS},
            title="head of a query",
            rounds=_ROUNDS,
            seconds=20,
            clock=time.thread_time,
        )
    first = found[str(_HEADS[0])]
    slowest = max(float(np.median(seconds / first)) for seconds in found.values())
    times = ", ".join(f"{num}: {1e6 * np.median(found[num]) / _QUERIES:.0f}" for num in found)
    yield Row(
        "head of a query, slowest / K = 1,024",
        "by name, at a recall; 2,048 + 1 numbers per row, warm page cache, no row cached",
        f"{slowest:.2f}",
        "<= 1.20",
        f"us {times}",
    )


def whole_query() -> Iterator[Row]:
    """Compare a complete query, from image bytes to verdict, with computing all K logits."""
    with tempfile.TemporaryDirectory(prefix="kway-") as folder:
        path = Path(folder) / "many"
        write_random(path, RESNET_50, _MANY, onnx=True)
        rows = load_file(path / WEIGHTS)["weight"]
        classifier = torch.nn.utils.skip_init(torch.nn.Linear, rows.shape[1] - 1, _MANY)
        classifier.requires_grad_(False)
        classifier.weight.copy_(rows[:, :-1])
        classifier.bias.copy_(rows[:, -1])
        models = {"onnxruntime": Model.open(path)}
        with patch("serving.model.onnx_is_installed", return_value=False):
            models["torch"] = Model.open(path)
        for precision in get_args(LowPrecision):
            try:
                models[precision] = _in_precision(path, precision)
            except ValueError as error:  # the processor does not support it
                yield Row("all K logits / one class", precision, "not measured", "", str(error))
        for engine, model in models.items():
            found = take_turns(
                {"one": _query(model), "all": _all_logits(model, classifier)},
                title=f"complete query, {engine}",
                seconds=20,
            )
            yield rate_row(
                "all K logits / one class, complete query",
                f"K = {_MANY:,}, ResNet-50, batch 1, {engine}",
                found["one"],
                found["all"],
                at_least=5.0,
                count=60,
                unit="queries per minute",
            )


def _in_precision(path: Path, precision: LowPrecision) -> Model:
    """Return the model of a random bundle in another precision, with the same thresholds."""
    out, onnx = path.with_name(precision), None
    with Bundle.open(path) as bundle:
        if precision == "int8":
            reader = open_reader(bundle)
            onnx = path.with_name("int8.onnx")
            write_int8(path / ONNX, [reader.collate([reader.prepare(_IMAGE)])], onnx)
        assert bundle.thresholds is not None
        rewrite_bundle(
            path,
            out,
            thresholds=bundle.thresholds,
            model_card="# random\n",
            precision=precision,
            onnx=onnx,
        )
    return Model.open(out)


def _head(small: Path, num_classes: int) -> Callable[[], None]:
    """Return a function that runs the head for `_QUERIES` queries on fixed features."""
    path = Path(shutil.copytree(small, small.with_name(str(num_classes))))
    draw = np.random.default_rng(0)
    class_ids = np.sort(draw.choice(num_classes, min(_NUM_ROWS, num_classes), replace=False))
    CONSOLE.print(f"writing {num_classes:,} classes")
    stretch(path, num_classes, class_ids)
    bundle = Bundle.open(path)
    features = torch.randn(1, bundle.spec.dim)
    names = [name_of(class_id) for class_id in draw.choice(class_ids, _QUERIES).tolist()]

    def queries() -> None:
        for name in names:
            answer(bundle, features, make_query(bundle, [name], recall=0.9))

    return queries


def _query(model: Model) -> Callable[[], None]:
    def query() -> None:
        query = make_query(model.bundle, [name_of(_MANY // 2)], recall=0.9)
        model.answer([model.prepare(_IMAGE)], query)

    return query


def _all_logits(model: Model, classifier: torch.nn.Linear) -> Callable[[], None]:
    @torch.inference_mode()
    def query() -> None:
        logits = classifier(model.features([model.prepare(_IMAGE)]))
        float(logits[0, _MANY // 2])

    return query


def gallery() -> Iterator[Row]:
    """Compare the exact search of a gallery with faiss's flat index, with as many threads."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    draw = np.random.default_rng(0)
    features = draw.standard_normal((_NUM_ITEMS, 256), np.float32)
    weights = torch.from_numpy(draw.standard_normal((64, 256), np.float32))
    flat, loss = faiss.IndexFlatIP(256), LossSpec(kind="batch_ce", aligned=True)
    flat.add(features)
    turn = itertools.cycle(range(len(weights)))

    def search() -> None:
        row = ClassRows(torch.zeros(1, dtype=torch.long), weights[next(turn)][None])
        best(class_scores(features, row, Dot(), loss), 0, 20)

    found = take_turns(
        {
            "search": search,
            "faiss": lambda: flat.search(weights[next(turn)][None].numpy(), 20),
            # The threads of faiss wait actively for a while, at the cost of the next contender.
            "pause": lambda: time.sleep(0.1),
        },
        title="gallery search",
        rounds=25,
        seconds=120,
    )
    case = f"{_NUM_ITEMS:,} features x 256"
    yield ratio_row("gallery search / faiss IndexFlatIP", case, found["search"], found["faiss"], 1)


# ---------------------------------------------------------------------------- runners

_HIGH_THROUGHPUT = {
    **variables(ServingConfig(high_throughput=True)),
    # Both servers run at the same time, and the default ports can be used by only one of them.
    "RAY_SERVE_HAPROXY_METRICS_PORT": "9111",
    "RAY_SERVE_HAPROXY_STATS_PORT": "8414",
}


class _Case(NamedTuple):
    """A model, the side of its images, and the requests per turn of 1 and 8 clients."""

    what: str
    network: dict[str, Any]
    side: int
    requests: tuple[int, int]


_CASES = (
    _Case("negligible model", NEGLIGIBLE, 8, (300, 600)),
    _Case("ResNet-18", RESNET_18, 224, (8, 32)),
)
_CLIENTS = (1, 8)
_JSON = {"Content-Type": "application/json"}


def runners() -> Iterator[Row]:
    """Compare the CPU time per query with that of the same model in a hand-written application."""
    with tempfile.TemporaryDirectory() as name:
        for case in _CASES:
            bundle = Path(name) / case.what
            write_random(bundle, case.network, 100, size=case.side)
            for what, peer, options, variables in (
                ("kway serve --no-ray / FastAPI on uvicorn", "plain", ("--no-ray",), {}),
                ("kway serve / FastAPI on Ray Serve", "ray", (), {}),
                (
                    "the same with --high-throughput",
                    "ray",
                    ("--high-throughput",),
                    _HIGH_THROUGHPUT,
                ),
            ):
                # The two servers start at the same time.
                with (
                    _peer(peer, bundle, variables) as theirs,
                    _kway(bundle, "--threads", "1", *options) as ours,
                ):
                    _wait_until_ready(theirs)
                    yield from _compared(what, case, [ours, theirs])


def _compared(what: str, case: _Case, servers: list["_Server"]) -> Iterator[Row]:
    body = _query_body(case.side)
    _check_same_work(servers, body)
    for clients, count in zip(_CLIENTS, case.requests, strict=True):
        turns = [_Turns(server, body, count, clients) for server in servers]
        contenders = dict(zip(("kway", "peer"), turns, strict=True))
        take_turns(contenders, title=f"{case.what}, {clients}", rounds=15, seconds=12)
        ours, theirs = (np.array(turn.cpu_seconds[1:]) / count for turn in turns)
        row = ratio_row(what, f"{case.what}, {clients} clients", ours, theirs, 1.15)
        yield replace(row, details=f"CPU time; {row.details}")


class _Turns:
    """Sends requests to a server, and records the CPU seconds of its processes for each turn."""

    def __init__(self, server: "_Server", body: bytes, count: int, clients: int) -> None:
        self._server, self._body = server, body
        self._count, self._clients = count, clients
        self.cpu_seconds: list[float] = []

    def __call__(self) -> None:
        before = self._server.cpu_seconds()
        with ThreadPoolExecutor(self._clients) as threads:
            sent = [threads.submit(self._send, n) for n in range(self._clients)]
            for each in sent:
                each.result()
        after = self._server.cpu_seconds()
        self.cpu_seconds.append(sum(after[one] - before.get(one, 0.0) for one in after))

    def _send(self, client: int) -> None:
        """Send the requests of a client sequentially over one connection."""
        with httpx.Client(timeout=60) as http:
            for _ in range(client, self._count, self._clients):
                http.post(self._server.query, content=self._body, headers=_JSON).raise_for_status()


def _query_body(side: int) -> bytes:
    image = base64.b64encode(noise_images.image(0, side, side, ".jpg")).decode()
    return json.dumps({"classes": [name_of(1)], "images": [image], "recall": 0.9}).encode()


def _check_same_work(servers: list["_Server"], body: bytes) -> None:
    scores = []
    for server in servers:
        answer = httpx.post(server.query, content=body, headers=_JSON, timeout=60)
        scores.append(answer.raise_for_status().json()["results"][0]["verdicts"][0]["score"])
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4, atol=1e-4)


class _Server(NamedTuple):
    """A server; `query` is the URL of its queries."""

    query: str
    pid: int

    def processes(self) -> list[psutil.Process]:
        main = psutil.Process(self.pid)
        return [main, *main.children(recursive=True)]

    def cpu_seconds(self) -> dict[int, float]:
        """Return the CPU seconds of each process of the server."""
        found = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
        return found


@contextmanager
def _kway(bundle: Path, *options: str) -> Iterator[_Server]:
    with tempfile.TemporaryDirectory() as folder:
        server = started.start(bundle, Path(folder) / "stderr", *options)
        try:
            yield _Server(f"{server.url}/v1/query", server.process.pid)
        finally:
            started.end(server)


@contextmanager
def _peer(kind: str, bundle: Path, variables: dict[str, str]) -> Iterator[_Server]:
    """Start a hand-written application. Call `_wait_until_ready` before it is used."""
    port = free_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "benchmarks.serving_peers", kind, str(port), str(bundle)]
    ray = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = {**os.environ, **ray, **variables}
    with subprocess.Popen(command, env=environment) as process:
        server = _Server(f"http://127.0.0.1:{port}/query", process.pid)
        try:
            yield server
        finally:
            children = server.processes()[1:] if process.poll() is None else []
            process.terminate()
            process.wait(60)
            for child in psutil.wait_procs(children, timeout=5)[1]:
                child.kill()


def _wait_until_ready(server: _Server) -> None:
    for _ in range(1200):
        with suppress(httpx.HTTPError):
            if httpx.options(server.query).status_code == 405:  # a route for POST exists
                return
        time.sleep(0.1)
    raise RuntimeError("the hand-written application did not start: see its error above")


def idle() -> Iterator[Row]:
    """Measure the processes and the memory of idle servers (proportional set size)."""
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "bundle"
        write_random(bundle, DEMO, 100, size=32)
        for what, options, targets in (
            ("kway serve --no-ray", ("--no-ray",), ("1", "<= 400 MiB")),
            ("kway serve", (), ("", "")),
        ):
            with _kway(bundle, *options) as server:
                time.sleep(5)
                processes = server.processes()
                pss = sum(one.memory_full_info().pss for one in processes) / 2**20
            yield Row(f"{what}: processes", "network of the demo", str(len(processes)), targets[0])
            yield Row(f"{what}: memory", "network of the demo", f"{pss:.0f} MiB", targets[1], "PSS")


# ---------------------------------------------------------------------------- bundles

_RECALLS = (
    RecallSpec(recall=0.9, confidence=0.9, pooled=0.0, pooled_samples=1000, min_positives=22),
)
_AT_ONCE = 1 << 14


def write_random(
    path: Path, network: dict[str, Any], num_classes: int, *, size: int = 224, onnx: bool = False
) -> None:
    """Write a bundle of `network` with random weights, including all class weights."""
    image = ImageConfig(size=size)
    backbone = build_backbone(BackboneConfig(config=network), image=image).eval()
    write_bundle(
        path,
        backbone=backbone,
        spec=BundleSpec(
            image=image,
            num_classes=num_classes,
            loss=LossSpec(kind="bce", aligned=True),
            bias=True,
            dim=backbone.dim,
            recalls=_RECALLS,
        ),
        classes=_classes(num_classes),
        thresholds=_thresholds(num_classes),
        weight_blocks=(
            torch.randn(min(_AT_ONCE, num_classes - start), backbone.dim + 1)
            for start in range(0, num_classes, _AT_ONCE)
        ),
        model_card="# random\n",
        write_onnx=(lambda file: write_onnx(backbone, image, file)) if onnx else None,
    )


def stretch(path: Path, num_classes: int, class_ids: np.ndarray) -> None:
    """Extend a bundle to `num_classes` classes, with random weights only for `class_ids`.

    The class weights are in a sparse file of the full length. This way, those of 2^24 classes with
    ResNet-50 (137 GB) fit on any disk. `pread` takes the same kernel path for regular files.
    """
    content = json.loads((path / SPEC).read_bytes())
    write_classes(path, _classes(num_classes))
    _thresholds(num_classes).write(path, num_classes)
    width = content["model"]["dim"] + 1
    header = header_of(TENSOR, num_classes, width)
    with (path / WEIGHTS).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 4 * width * num_classes)
        rows = torch.randn(len(class_ids), width)
        for class_id, row in zip(class_ids.tolist(), rows, strict=True):
            file.seek(len(header) + 4 * width * class_id)
            file.write(row.numpy().tobytes())
    content["model"]["num_classes"] = num_classes
    for name, entry in content["files"].items():
        entry["bytes"] = (path / name).stat().st_size
        if name != WEIGHTS:  # up to 137 GB, and not verified here
            entry["sha256"] = sha256_of(path / name)
    (path / SPEC).write_text(json.dumps(content))


def name_of(class_id: int) -> str:
    return f"species {class_id}"


def _classes(num_classes: int) -> Iterator[ClassInfo]:
    return (ClassInfo(name=name_of(class_id)) for class_id in range(num_classes))


def _thresholds(num_classes: int) -> ClassThresholds:
    positives = np.full(num_classes, 50, np.int32)
    thresholds = np.zeros((num_classes, 1), np.float32)
    reached = np.full((num_classes, 1, 2), 50, np.int32)
    kinds = np.full((num_classes, 1), KINDS.index("guaranteed"), np.uint8)
    pass_rates = np.full((num_classes, 1, 3), 0.95, np.float32)
    return ClassThresholds(_RECALLS, positives, thresholds, reached, kinds, pass_rates)


SECTIONS: Sections = {
    "heads": heads,
    "query": whole_query,
    "gallery": gallery,
    "runners": runners,
    "idle": idle,
}


if __name__ == "__main__":
    report(command_line("serving", __doc__).parse_args(), SECTIONS)
