"""What `kway shard` takes from files that describe classes: label vectors, and WordNet.

How such files are read is `heads.tree`; the sources know only what comes of it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np

    from data.sources import Source
    from data.sources.label_vectors import WithLabelVectors
    from heads.tree import WordNet

Vectors = Annotated[
    Path | None,
    typer.Option(
        help="label vectors by class name: word2vec .bin, fastText .vec, GloVe .txt (also .gz), "
        ".npz or .safetensors with names"
    ),
]
WordNetFolder = Annotated[
    Path | None,
    typer.Option(
        "--wordnet", help="WordNet dict folder: words and hierarchy of classes that are synsets"
    ),
]


def with_label_vectors(source: "Source", file: Path | None) -> "WithLabelVectors | None":
    """The source with label vectors from what a `--vectors` names, if anything."""
    from data.sources.label_vectors import WithLabelVectors

    return None if file is None else WithLabelVectors(source, file, _find)


def read_taxonomy(folder: Path | None) -> "WordNet | None":
    """What a `--wordnet` names, if anything."""
    from heads.tree import read_wordnet

    return None if folder is None else read_wordnet(folder)


def _find(file: Path, names: Sequence[str]) -> "tuple[np.ndarray, list[str]]":
    from heads.tree import load_label_vectors

    return load_label_vectors(file, names, missing="zero")
