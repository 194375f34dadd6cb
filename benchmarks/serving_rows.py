"""Cost of querying one class, by number of classes: the head of a query, a complete query compared
with computing all K logits, and the start of a replica."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks.serving_bundles import RESNET_50, name_of, stretch, write_random
from benchmarks.timing import CONSOLE, Row, rate_row, take_turns
from serving.answer import answer, make_query
from serving.model import Engine, Model, open_reader
from trainer.backbone.precision import LowPrecision
from trainer.backbone.quantization import write_int8
from trainer.bundle.bundle import Bundle
from trainer.bundle.spec import ONNX, WEIGHTS
from trainer.bundle.writing import rewrite_bundle

_HEADS = tuple(1 << power for power in (10, 14, 18, 21, 24))
# Many short turns, so that other load on the machine affects all contenders equally.
_QUERIES, _ROUNDS, _NUM_ROWS = 100, 101, 1000
_MANY = 370_728  # 2^18.5, as in paper 002, table 3
_START_CLASSES, _START_NETWORK = 1_000_000, {"hidden_sizes": [64, 768], "depths": [1, 1]}


def heads() -> Iterator[Row]:
    """Time the head of a query by number of classes, and compare it with the backbone."""
    with tempfile.TemporaryDirectory(prefix="kway-") as folder:
        path = Path(folder) / "small"
        write_random(path, RESNET_50, _NUM_ROWS + 24, onnx=True)
        model = Model.open(path)
        heads = {str(num_classes): _head(path, num_classes) for num_classes in _HEADS}
        # Measure the thread's CPU time: the thread never waits, and wall time would depend on the
        # machine's load.
        found = take_turns(
            heads, title="head of a query", rounds=_ROUNDS, seconds=60, clock=time.thread_time
        )
        last = str(_HEADS[-1])
        relative = take_turns(
            {"head": heads[last], "backbone": _forward(model)},
            title="head and backbone",
            rounds=_ROUNDS,
            seconds=60,
        )
    each = {num: found[str(num)] / _QUERIES for num in _HEADS}
    first = each[_HEADS[0]]
    ratios = {num: float(np.median(seconds / first)) for num, seconds in each.items()}
    most = max(ratios, key=ratios.__getitem__)
    times = ", ".join(f"{num:,}: {1e6 * np.median(each[num]):.0f}" for num in _HEADS)
    case = "by name, at a recall; 2,048 + 1 numbers per row, warm page cache, no row cached"
    yield Row(
        "head of a query, slowest / K = 1,024",
        case,
        f"{ratios[most]:.2f}",
        "<= 1.20",
        f"us {times}",
    )
    share = float(np.median(relative["head"] / _QUERIES / relative["backbone"]))
    yield Row(
        "head of a query / backbone",
        f"K = {_HEADS[-1]:,}; ResNet-50, batch 1, {model.engine}",
        f"{share:.2%}",
        "<= 1%",
        f"backbone {1e3 * np.median(relative['backbone']):.1f} ms",
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
        image = _image()
        engines: tuple[Engine, ...] = ("torch", "onnxruntime")
        models: dict[str, Model] = {
            engine: Model(Bundle.open(path), engine=engine) for engine in engines
        }
        precisions: tuple[LowPrecision, ...] = ("bf16", "int8")
        for precision in precisions:
            models[precision] = _in_precision(path, precision)
        for engine, model in models.items():
            found = take_turns(
                {
                    "one": _query(model, image),
                    "all": _all_logits(model, image, classifier),
                },
                title=f"complete query, {engine}",
                seconds=60,
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
            write_int8(path / ONNX, [reader.collate([reader.prepare(_image())])], onnx)
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


def start() -> Iterator[Row]:
    """Measure the start-up time that a 3 GB head adds to a replica."""
    network = {"model_type": "resnet", "embedding_size": 16, **_START_NETWORK}
    with tempfile.TemporaryDirectory(prefix="kway-") as folder:
        path = Path(folder) / "b"
        write_random(path, network, 1000, size=64)
        small = Bundle.open(path)
        large = Path(shutil.copytree(path, Path(folder) / "large"))
        stretch(large, _START_CLASSES, np.arange(1000))
        size = (large / WEIGHTS).stat().st_size

        def replica() -> None:
            opened = Bundle.open(large)
            Model(opened).self_check()
            opened.class_id(name_of(_START_CLASSES - 1))

        def backbone() -> None:
            pixels = torch.zeros((1, 3, 64, 64), dtype=torch.uint8)
            with torch.inference_mode():
                small.load_backbone()({"pixel_values": pixels})

        contenders = {
            "replica": replica,
            "check": lambda: Bundle.open(large).verify(class_weights=False),
            "backbone": backbone,
        }
        found = take_turns(contenders, title="start", seconds=60)
    above = found["replica"] - found["backbone"]
    parts = ", ".join(f"{name} {np.median(seconds):.3f}" for name, seconds in found.items())
    yield Row(
        "start-up time of a replica minus that of its backbone",
        f"K = {_START_CLASSES:,}, class weights of {size / 1e9:.2f} GB (sparse)",
        f"{np.median(above):.3f} s",
        "< 1 s",
        f"s {parts}; check: checksums of all files except the class weights, once per kway serve",
    )


def _head(small: Path, num_classes: int) -> Callable[[], None]:
    """Return a function that runs the head for `_QUERIES` queries on fixed features."""
    path = Path(shutil.copytree(small, small.with_name(str(num_classes))))
    draw = np.random.default_rng(0)
    class_ids = np.sort(draw.choice(num_classes, min(_NUM_ROWS, num_classes), replace=False))
    CONSOLE.print(f"writing {num_classes:,} classes")
    stretch(path, num_classes, class_ids)
    bundle = Bundle.open(path, cache_bytes=0)
    features = torch.randn(1, bundle.spec.dim)
    names = [name_of(class_id) for class_id in draw.choice(class_ids, _QUERIES).tolist()]

    def queries() -> None:
        for name in names:
            answer(bundle, features, make_query(bundle, [name], recall=0.9))

    return queries


def _forward(model: Model) -> Callable[[], None]:
    prepared = [model.prepare(_image())]

    def forward() -> None:
        model.features(prepared)

    return forward


def _query(model: Model, image: bytes) -> Callable[[], None]:
    def query() -> None:
        query = make_query(model.bundle, [name_of(_MANY // 2)], recall=0.9)
        model.answer([model.prepare(image)], query)

    return query


def _all_logits(model: Model, image: bytes, classifier: torch.nn.Linear) -> Callable[[], None]:
    @torch.inference_mode()
    def query() -> None:
        logits = classifier(model.features([model.prepare(image)]))
        float(logits[0, _MANY // 2])

    return query


def _image() -> bytes:
    """Return a JPEG with the typical size of ImageNet's images."""
    pixels = np.random.default_rng(0).integers(0, 256, (47, 63, 3), dtype=np.uint8)
    large = cv2.resize(pixels, (500, 375), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", large)[1].tobytes()
