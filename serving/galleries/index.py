"""The approximate index of a large gallery: it finds the items that may have the highest scores.

k-means divides the items into lists, which contain the features of their items with 8 bits per
value (an inverted file of faiss). A search reads the lists whose centers have the largest products
with the query, and takes the candidates with the largest approximate scores. The caller computes
their exact scores from the stored rows.
"""

from pathlib import Path
from types import ModuleType

import numpy as np
from pydantic import Field

from data.extras import install_command
from trainer.bundle.spec import Spec

INDEX = "index.faiss"
DAMAGE_REMEDY = "copy the gallery again, or remove it and index again"
TARGET_RECALL = 0.95
# A search through the index returns at most this many hits: its recall is unknown beyond them.
MAX_HITS = 100
_NUM_CANDIDATES = 10 * MAX_HITS

# Shape legend: N items, d dimensions.


class IndexInfo(Spec):
    """The approximate index, and its recall when it was built: the mean share of the k best items
    that a search finds, over queries for `num_queries` classes."""

    num_lists: int = Field(gt=0)
    num_probes: int = Field(gt=0, description="number of lists that a search reads")
    is_normalized: bool = Field(description="whether the index contains features of unit length")
    num_queries: int = Field(gt=0)
    recall: dict[int, float] = Field(description="recall by depth k")

    @property
    def is_default(self) -> bool:
        """Whether searches use the index unless the request sets `exact`."""
        return self.recall.get(MAX_HITS, 0.0) >= TARGET_RECALL


class ApproximateIndex:
    """An opened index. Its lists are memory-mapped, so all processes share the memory.
    Thread-safe."""

    def __init__(self, path: Path, shape: tuple[int, ...], num_probes: int) -> None:
        """`shape` is [N, d]. Raises ValueError if the file is damaged or faiss is not installed."""
        faiss = import_faiss()
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
        # faiss would select the lists with the nearest centers, which depends on the norm of the
        # query.
        products = self._centers @ query
        lists = np.argpartition(-products, self._num_probes - 1)[: self._num_probes]
        _, found = self._index.search_preassigned(
            query[None], _NUM_CANDIDATES, lists[None].astype(np.int64), products[lists][None]
        )
        return np.sort(found[0][found[0] >= 0])


def import_faiss() -> ModuleType:
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
