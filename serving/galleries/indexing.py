"""Build the approximate index of a gallery and measure its recall.

The number of lists that a search reads is the smallest power of two that reaches `TARGET_RECALL`,
and at most 1/8 of the lists.
"""

from pathlib import Path

import numpy as np

from heads.logits import inverse_norms_of
from serving.galleries.index import (
    MAX_HITS,
    TARGET_RECALL,
    ApproximateIndex,
    IndexInfo,
    import_faiss,
)
from serving.galleries.searching import best, class_scores
from trainer.bundle.bundle import Bundle

# `kway index` indexes larger galleries by default.
LEAST_ITEMS = 200_000
# Training time is proportional to the product of these numbers.
_ITERATIONS, _SAMPLES_PER_LIST = 10, 40
_MAX_QUERIES = 200
_MAX_SHARE = 8  # a search reads at most 1/8 of the lists; exact search is about as fast as more
_BLOCK = 65_536

# Shape legend: N items, d dimensions.


def build_index(features_Nd: np.ndarray, path: Path, bundle: Bundle) -> IndexInfo:
    """Write the index of `features_Nd`, float32 [N, d], to `path`, and measure its recall with
    classes of `bundle`.

    Memory use is d bytes per item. Raises ValueError if faiss is not installed.
    """
    faiss, spec = import_faiss(), bundle.spec
    num_items, dim = features_Nd.shape
    norms = inverse_norms_of(features_Nd) if spec.logits.normalizes else None

    def indexed(items: slice) -> np.ndarray:
        return features_Nd[items] * (1 if norms is None else norms[items, None])

    num_lists = max(1, min(round(2 * num_items**0.5), num_items // _SAMPLES_PER_LIST))
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatL2(dim),
        dim,
        num_lists,
        faiss.ScalarQuantizer.QT_8bit,
        faiss.METRIC_INNER_PRODUCT,
        False,  # quantize the features, not their differences from the centers
    )
    index.cp.niter, index.cp.min_points_per_centroid = _ITERATIONS, 1
    index.train(indexed(slice(None, None, max(1, num_items // (num_lists * _SAMPLES_PER_LIST)))))
    for first in range(0, num_items, _BLOCK):
        index.add(indexed(slice(first, first + _BLOCK)))
    faiss.write_index(index, str(path))
    del index  # the opened file is mapped, so only one copy is in memory

    last = spec.num_classes - 1
    class_ids = np.unique(np.linspace(0, last, _MAX_QUERIES).astype(int)).tolist()
    rows = [bundle.rows([class_id]) for class_id in class_ids]
    expected = [
        best(class_scores(features_Nd, row, spec.logits, spec.loss, norms), 0, MAX_HITS)
        for row in rows
    ]
    most, num_probes = max(1, num_lists // _MAX_SHARE), 1
    while True:
        opened = ApproximateIndex(path, features_Nd.shape, num_probes)
        found = []
        for row in rows:
            items = opened.candidates(row.rows[0].numpy())
            scores = class_scores(features_Nd[items], row, spec.logits, spec.loss)
            found.append(items[best(scores, 0, MAX_HITS)])
        recall = {depth: _recall(expected, found, depth) for depth in (10, MAX_HITS)}
        if recall[MAX_HITS] >= TARGET_RECALL or num_probes == most:
            return IndexInfo(
                num_lists=num_lists,
                num_probes=num_probes,
                is_normalized=norms is not None,
                num_queries=len(rows),
                recall=recall,
            )
        num_probes = min(2 * num_probes, most)


def _recall(expected: list[np.ndarray], found: list[np.ndarray], depth: int) -> float:
    """Return the mean share of the best items that were found. In a small gallery, the depth is at
    most its number of items."""
    pairs = zip(expected, found, strict=True)
    return float(np.mean([np.isin(one[:depth], other[:depth]).mean() for one, other in pairs]))
