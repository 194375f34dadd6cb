"""Gallery search compared with `numpy.dot` on the same memory-mapped features.

The difference is the cost of scores, ordering and paging on top of the matrix product.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.timing import Row, ratio_row, take_turns
from heads.logits import ClassRows, Dot
from serving.galleries.ranking import Ranking, class_scores
from serving.galleries.rows import map_matrix, matrix_header
from trainer.bundle.spec import LossSpec

_ITEMS, _DIM, _PAGE = 1_000_000, 256, 20
_LOSS = LossSpec(kind="batch_ce", aligned=True)


def rows() -> Iterator[Row]:
    """Compare the first search for a class, and fetching its next page, with the matrix product."""
    with tempfile.TemporaryDirectory() as folder:
        features = _mapped_features(Path(folder) / "features.safetensors")
        weights = torch.randn(64, _DIM)
        classes = ClassRows(torch.arange(64), weights, torch.randn(64))
        turn = iter(range(10**9))

        def first_page() -> None:
            index = next(turn) % len(weights)
            row = classes[index : index + 1]
            Ranking(class_scores(features, row, Dot(), _LOSS)).page(0, _PAGE)

        def product() -> None:
            np.dot(features, weights[next(turn) % len(weights)].numpy())

        ranking = Ranking(class_scores(features, classes[:1], Dot(), _LOSS))

        def next_page() -> None:
            ranking.count_reaching(1.0)
            ranking.page(_PAGE, _PAGE)

        found = take_turns(
            {"search": first_page, "dot": product, "next": next_page},
            title="gallery search",
            rounds=25,
            seconds=120,
        )
    case = f"{_ITEMS:,} features x {_DIM}, warm page cache"
    yield ratio_row("gallery search / numpy.dot", case, found["search"], found["dot"], 1.3)
    yield ratio_row("next page, by threshold / numpy.dot", case, found["next"], found["dot"])


def _mapped_features(path: Path) -> np.ndarray:
    """Return random memory-mapped features, float32 [_ITEMS, _DIM], read once to warm the cache."""
    generator = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(matrix_header("<f4", (_ITEMS, _DIM)))
        for _ in range(0, _ITEMS, 10_000):
            file.write(generator.standard_normal((10_000, _DIM), np.float32).tobytes())
    features = map_matrix(path, "<f4", (_ITEMS, _DIM))
    features.sum()
    return features
