"""Raw sources -> webdataset shards -> deterministic, resumable batches.

Names load on first use, so that `kway --help` and `kway query`, which import other modules of this
package, stay free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.loading.batch import Batch, Cursor
    from data.loading.loader import EvalLoader, TrainLoader
    from data.shards.hierarchy import class_paths
    from data.shards.manifest import Manifest, load_label_vectors
    from data.shards.split import Split, open_split

__all__ = [
    "Batch",
    "Cursor",
    "EvalLoader",
    "Manifest",
    "Split",
    "TrainLoader",
    "class_paths",
    "load_label_vectors",
    "open_split",
]

_HOME = {
    "Batch": "data.loading.batch",
    "Cursor": "data.loading.batch",
    "EvalLoader": "data.loading.loader",
    "Manifest": "data.shards.manifest",
    "Split": "data.shards.split",
    "TrainLoader": "data.loading.loader",
    "class_paths": "data.shards.hierarchy",
    "load_label_vectors": "data.shards.manifest",
    "open_split": "data.shards.split",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
