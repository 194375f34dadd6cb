"""Raw sources -> webdataset shards -> deterministic, resumable batches.

Names load on first use, so that `data.config` stays free of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from data.batch import Batch, Cursor
    from data.hierarchy import class_paths
    from data.loader import EvalLoader, TrainLoader
    from data.manifest import Manifest, load_label_vectors
    from data.split import Split, open_split

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
    "Batch": "data.batch",
    "Cursor": "data.batch",
    "EvalLoader": "data.loader",
    "Manifest": "data.manifest",
    "Split": "data.split",
    "TrainLoader": "data.loader",
    "class_paths": "data.hierarchy",
    "load_label_vectors": "data.manifest",
    "open_split": "data.split",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'data' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
