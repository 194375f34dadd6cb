"""Gallery search compared with faiss's flat index, which also compares a query with every item, and
the approximate index compared with exact search."""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import torch

from benchmarks.timing import Row, ratio_row, take_turns
from heads.logits import ClassRows, Dot
from serving.galleries.gallery import map_matrix, matrix_header
from serving.galleries.index import ApproximateIndex, build_index
from serving.galleries.searching import best, class_scores
from trainer.bundle.spec import LossSpec

_ITEMS, _DIM, _PAGE = 1_000_000, 256, 20
_CLUSTERS, _BLOCK = 5_000, 10_000
_PAUSE_SECONDS = 0.1
_LOSS = LossSpec(kind="batch_ce", aligned=True)


def searches() -> Iterator[Row]:
    """Compare searches for a class."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "index"
        features, classes = _mapped_features(file.with_name("features.safetensors")), _classes()
        info = build_index(features, file, classes_Qd=classes.rows, normalizes=False)
        index = ApproximateIndex(file, features.shape, num_probes=info.num_probes)
        flat = faiss.IndexFlatIP(_DIM)
        flat.add(features)
        turn = itertools.cycle(range(len(classes.rows)))

        def search(method: Callable[[ClassRows], object]) -> Callable[[], None]:
            def run() -> None:
                position = next(turn)
                method(classes[position : position + 1])

            return run

        found = take_turns(
            {
                "exact": search(lambda row: _search(features, row)),
                "faiss": search(lambda row: flat.search(row.rows.numpy(), _PAGE)),
                # The threads of faiss wait actively for a while, at the cost of the next contender.
                "pause": lambda: time.sleep(_PAUSE_SECONDS),
                "index": search(
                    lambda row: _search(features[index.candidates(row.rows[0].numpy())], row)
                ),
            },
            title="gallery search",
            rounds=25,
            seconds=120,
        )
    case = f"{_ITEMS:,} features x {_DIM} in {_CLUSTERS:,} clusters, warm page cache"
    yield ratio_row("gallery search / faiss IndexFlatIP", case, found["exact"], found["faiss"], 1.0)
    recall = ", ".join(f"{share:.3f} at {depth}" for depth, share in info.recall.items())
    what = f"search through the index / exact; recall {recall}"
    yield ratio_row(what, case, found["index"], found["exact"], 1.0)


def _search(features: np.ndarray, row: ClassRows) -> None:
    best(class_scores(features, row, Dot(), _LOSS), 0, _PAGE)


def _centers() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((_CLUSTERS, _DIM), np.float32)


def _classes() -> ClassRows:
    """Return weights of classes, each near the center of a cluster."""
    noise = np.random.default_rng(2).standard_normal((64, _DIM), np.float32)
    rows = torch.from_numpy(_centers()[:64] + 0.3 * noise)
    return ClassRows(torch.arange(len(rows)), rows)


def _mapped_features(path: Path) -> np.ndarray:
    """Return random memory-mapped features, float32 [_ITEMS, _DIM], in clusters of 200 items on
    average, read once to warm the cache."""
    generator, centers = np.random.default_rng(0), _centers()
    with path.open("wb") as file:
        file.write(matrix_header("<f4", (_ITEMS, _DIM)))
        for _ in range(0, _ITEMS, _BLOCK):
            noise = generator.standard_normal((_BLOCK, _DIM), np.float32)
            file.write((centers[generator.integers(0, _CLUSTERS, _BLOCK)] + noise).tobytes())
    features = map_matrix(path, "<f4", (_ITEMS, _DIM))
    features.sum()
    return features
