"""The approximate index of a large gallery: it finds the items that may have the highest scores.

k-means divides the items into lists, which contain the features of their items with 8 bits per
value (an inverted file of faiss). A search reads the lists whose centers have the largest products
with the query, and takes the candidates with the largest approximate scores. The caller computes
their exact scores from the stored rows.

The number of lists that a search reads is the smallest power of two that reaches `TARGET_RECALL`,
as measured on classes and items when the index is built, and at most 1/8 of the lists.
"""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from data.extras import install_command
from heads.logits import unit_vectors
from serving.galleries.format import DAMAGE_REMEDY, TARGET_DEPTH, TARGET_RECALL, IndexInfo
from trainer.bundle.bundle import Bundle

# `kway index` indexes larger galleries by default.
LEAST_ITEMS = 200_000
# A search through the index returns at most this many hits: its recall is unknown beyond them.
MAX_HITS = TARGET_DEPTH
_NUM_CANDIDATES = 10 * MAX_HITS
_DEPTHS = (10, TARGET_DEPTH)
# Training time is proportional to the product of these numbers.
_ITERATIONS, _SAMPLES_PER_LIST = 10, 40
_MAX_QUERIES = 200  # of each kind
_MAX_SHARE = 8  # a search reads at most 1/8 of the lists; exact search is about as fast as more
_BLOCK = 65_536

# Shape legend: N items, Q queries, d dimensions, k depth.


def supports_index(bundle: Bundle) -> bool:
    """Return whether the items with the largest products have the highest scores."""
    return bundle.spec.loss.score == "logit"


def sample_classes(bundle: Bundle) -> torch.Tensor:
    """Return the weights [Q, d] of the classes with which the recall is measured."""
    last = bundle.spec.num_classes - 1
    return bundle.rows(np.unique(np.linspace(0, last, _MAX_QUERIES).astype(int)).tolist()).rows


class ApproximateIndex:
    """An opened index. Its lists are memory-mapped, so all processes share the memory.
    Thread-safe."""

    def __init__(self, path: Path, shape: tuple[int, ...], *, num_probes: int) -> None:
        """`shape` is [N, d], and `num_probes` is the number of lists that a search reads.

        Raises ValueError if the file is damaged or faiss is not installed.
        """
        faiss = _faiss()
        try:
            self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        except RuntimeError as error:
            raise ValueError(f"{path} is damaged: {DAMAGE_REMEDY}") from error
        if (self._index.ntotal, self._index.d) != shape:
            raise ValueError(f"{path} does not belong to this gallery: {DAMAGE_REMEDY}")
        # If the file is in the page cache, starting threads that read ahead takes longer than the
        # search.
        faiss.downcast_InvertedLists(self._index.invlists).prefetch_nthread = 0
        quantizer = faiss.downcast_index(self._index.quantizer)
        self._centers: np.ndarray = quantizer.reconstruct_n(0, quantizer.ntotal)
        self._index.nprobe = self._num_probes = min(num_probes, len(self._centers))

    def candidates(self, query: np.ndarray) -> np.ndarray:
        """Return the items that may have the largest products with `query`, float32 [d], as int64
        in ascending order."""
        query = np.ascontiguousarray(query, np.float32)
        # faiss would select the lists with the nearest centers, which depends on the norm of the
        # query.
        products = self._centers @ query
        lists = np.argpartition(-products, self._num_probes - 1)[: self._num_probes]
        _, found = self._index.search_preassigned(
            query[None], _NUM_CANDIDATES, lists[None].astype(np.int64), products[lists][None]
        )
        return np.sort(found[0][found[0] >= 0])


def build_index(
    features_Nd: np.ndarray, path: Path, *, classes_Qd: torch.Tensor, normalizes: bool
) -> IndexInfo:
    """Write the index of `features_Nd`, float32 [N, d], to `path` and measure its recall with
    `classes_Qd`. If `normalizes`, the index is for cosines instead of products.

    Memory use is d bytes per item. Raises ValueError if faiss is not installed.
    """
    faiss = _faiss()
    num_items, dim = features_Nd.shape
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
    step = max(1, num_items // (num_lists * _SAMPLES_PER_LIST))
    index.train(_prepared(features_Nd[::step], normalizes).numpy())
    for block in _blocks(features_Nd, normalizes):
        index.add(block.numpy())
    faiss.write_index(index, str(path))
    del index  # the opened file is mapped, so only one copy is in memory

    kinds = [classes_Qd.float()]
    if normalizes:
        items = np.unique(np.linspace(0, num_items - 1, _MAX_QUERIES).astype(int))
        kinds = [unit_vectors(one) for one in (*kinds, torch.from_numpy(features_Nd[items]))]
    exact = [_exact_best(features_Nd, queries_Qd, normalizes) for queries_Qd in kinds]
    most, num_probes = max(1, num_lists // _MAX_SHARE), 1
    while True:
        opened = ApproximateIndex(path, features_Nd.shape, num_probes=num_probes)
        shares = [
            _recall(opened, features_Nd, queries_Qd.numpy(), exact_Qk, normalizes)
            for queries_Qd, exact_Qk in zip(kinds, exact, strict=True)
        ]
        recall = dict(zip(_DEPTHS, np.min(shares, 0).tolist(), strict=True))
        if recall[TARGET_DEPTH] >= TARGET_RECALL or num_probes == most:
            return IndexInfo(
                num_lists=num_lists,
                num_probes=num_probes,
                is_normalized=normalizes,
                num_queries=sum(map(len, kinds)),
                recall=recall,
            )
        num_probes = min(2 * num_probes, most)


def _recall(
    index: ApproximateIndex,
    features_Nd: np.ndarray,
    queries_Qd: np.ndarray,
    exact_Qk: np.ndarray,
    normalizes: bool,
) -> np.ndarray:
    """Return the mean recall at each depth. In a small gallery, the depths are at most its number
    of items."""
    shares = []
    for query, exact in zip(queries_Qd, exact_Qk, strict=True):
        items = index.candidates(query)
        products = _prepared(features_Nd[items], normalizes).numpy() @ query
        found = items[np.argsort(-products, kind="stable")]
        shares.append(
            [
                len(np.intersect1d(found[:depth], exact[:depth])) / len(exact[:depth])
                for depth in _DEPTHS
            ]
        )
    return np.array([np.mean(of_depth) for of_depth in zip(*shares, strict=True)])


def _exact_best(features_Nd: np.ndarray, queries_Qd: torch.Tensor, normalizes: bool) -> np.ndarray:
    """Return the items with the largest products with each query, int64 [Q, k]."""
    num = len(queries_Qd)
    values, items = torch.empty(num, 0), torch.empty(num, 0, dtype=torch.long)
    first = 0
    for block in _blocks(features_Nd, normalizes):
        values = torch.cat([values, queries_Qd @ block.T], 1)
        new = torch.arange(first, first + len(block)).expand(num, -1)
        items = torch.cat([items, new], 1)
        values, order = values.topk(min(MAX_HITS, values.shape[1]))
        items, first = items.gather(1, order), first + len(block)
    return items.numpy()


def _blocks(features_Nd: np.ndarray, normalizes: bool) -> Iterator[torch.Tensor]:
    for first in range(0, len(features_Nd), _BLOCK):
        yield _prepared(features_Nd[first : first + _BLOCK], normalizes)


def _prepared(features: np.ndarray, normalizes: bool) -> torch.Tensor:
    copied = torch.from_numpy(np.array(features))  # the mapped rows are read-only
    return unit_vectors(copied) if normalizes else copied


def _faiss() -> ModuleType:
    # Import here, because most galleries do not have an index.
    try:
        import faiss
    except ImportError as error:
        raise ValueError(
            f"an approximate index requires faiss: run {install_command('serve')}, or index with "
            "--no-index"
        ) from error
    module: ModuleType = faiss
    return module
