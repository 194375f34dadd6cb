"""Label vectors from files: one vector a class, by class name or by row; and fewer dimensions.

Files with names are matched to the class names; files without are rows in class-list order.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open

from heads.tree.names import NameLookup
from heads.tree.word_files import WORD_FILE_SUFFIXES, Entry, read_words, word_file_suffix

FloatVectors = NDArray[np.float32]
Missing = Literal["error", "mean", "zero"]

ARRAY_FILE_SUFFIXES = (".npy", ".npz", ".safetensors")
_NAMES_SHOWN = 3


def load_label_vectors(
    path: str | Path, class_names: Sequence[str], *, missing: Missing = "error"
) -> tuple[FloatVectors, list[str]]:
    """Vectors float32 [K, D] in the order of `class_names`, and the names that have none.

    Word vectors (`.bin` word2vec, `.vec` fastText, `.txt` GloVe or word2vec text, each also `.gz`)
    and array files with names are matched by name, as `NameLookup` says. `.npy`, and `.npz` or
    `.safetensors` whose array `vectors` comes without names, are K rows in class order.

    `missing` says what becomes of a name without a vector: an error, the mean of the others, or
    zeros. Raises ValueError for that, for a file of another shape, and where no name is known.
    """
    path = Path(path)
    if word_file_suffix(path) in WORD_FILE_SUFFIXES:
        return _by_name(path, None, class_names, missing)
    names, vectors = read_label_vectors(path)
    if names is not None:
        return _by_name(path, zip(names, vectors, strict=True), class_names, missing)
    if len(vectors) != len(class_names):
        raise ValueError(
            f"{path} has {len(vectors)} rows without names and there are {len(class_names)} "
            "classes: give a row a class, in the order of the class list"
        )
    return vectors, []


def read_label_vectors(path: str | Path) -> tuple[list[str] | None, FloatVectors]:
    """All names of a file, None where it has none, and its vectors float32 [N, D].

    Raises FileNotFoundError, and ValueError for what holds no finite numbers [N, D].
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"label vectors {path} do not exist: give the path of a file")
    suffix = word_file_suffix(path)
    if suffix in WORD_FILE_SUFFIXES:
        entries = list(read_words(path, lambda _: True))
        return [name for name, _ in entries], np.stack([vector for _, vector in entries])
    match path.suffix:
        case ".npy":
            names, array = None, _load_numpy(path)
        case ".npz":
            names, array = _from_npz(path)
        case ".safetensors":
            names, array = _from_safetensors(path)
        case _:
            known = ", ".join((*ARRAY_FILE_SUFFIXES, *WORD_FILE_SUFFIXES))
            raise ValueError(f"label vectors {path} end in {path.suffix!r}: give one of {known}")
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} holds {array.dtype} of shape {list(array.shape)}: give numbers, [classes, dim]"
        )
    vectors = array.astype(np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError(f"{path} holds NaN, infinity or more than float32 can: mend the file")
    if names is not None and len(names) != len(vectors):
        raise ValueError(f"{path} has {len(names)} names and {len(vectors)} vectors")
    return names, vectors


def project(vectors: ArrayLike, dim: int) -> FloatVectors:
    """Rows [K, D] scaled to unit length, on their first `dim` principal components [K, dim].

    The sign of a component is that which makes its largest entry positive, so that a platform
    changes nothing. ValueError unless 1 <= dim <= min(K, D).
    """
    rows = np.asarray(vectors, np.float64)
    if not 1 <= dim <= min(rows.shape):
        raise ValueError(
            f"cannot project {len(rows)} vectors of {rows.shape[1]} dimensions to {dim}: "
            f"give 1..{min(rows.shape)}"
        )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    rows -= rows.mean(0)
    _, axes = np.linalg.eigh(rows.T @ rows)
    axes = axes[:, : -dim - 1 : -1]
    largest = axes[np.abs(axes).argmax(0), np.arange(dim)]
    return (rows @ (axes * np.sign(largest))).astype(np.float32)


def _by_name(
    path: Path, entries: Iterable[Entry] | None, class_names: Sequence[str], missing: Missing
) -> tuple[FloatVectors, list[str]]:
    if not path.is_file():
        raise FileNotFoundError(f"label vectors {path} do not exist: give the path of a file")
    lookup = NameLookup(class_names)
    for name, vector in read_words(path, lookup.wants) if entries is None else entries:
        if lookup.wants(name):
            lookup.add(name, vector)
    found = [lookup.vector(name) for name in class_names]
    return _filled(path, found, class_names, missing)


def _filled(
    path: Path, found: list[FloatVectors | None], class_names: Sequence[str], missing: Missing
) -> tuple[FloatVectors, list[str]]:
    without = [name for name, vector in zip(class_names, found, strict=True) if vector is None]
    known = [vector for vector in found if vector is not None]
    if missing not in ("error", "mean", "zero"):
        raise ValueError(f"missing is {missing!r}: use error, mean or zero")
    if not known:
        raise ValueError(
            f"{path} has a vector for none of {len(class_names)} names, such as {class_names[0]!r}"
        )
    if without and missing == "error":
        shown = ", ".join(map(repr, without[:_NAMES_SHOWN]))
        raise ValueError(
            f"{path} has no vector for {len(without)} of {len(class_names)} class names "
            f"({shown}{', …' if len(without) > _NAMES_SHOWN else ''}): rename them, "
            "or let missing ones be the mean of the others or zero"
        )
    vectors = np.stack(known)
    filler = vectors.mean(0) if missing == "mean" else np.zeros_like(vectors[0])
    return np.stack([filler if vector is None else vector for vector in found]), without


def _load_numpy(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
        return array
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no sound .npy file ({_line(error)})") from None


def _from_npz(path: Path) -> tuple[list[str] | None, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files if key in ("vectors", "names")}
            keys = file.files
    except Exception as error:  # zipfile, zlib and numpy each raise their own
        raise ValueError(f"{path} is no sound .npz file ({_line(error)})") from None
    if "vectors" not in arrays:
        raise ValueError(f"{path} has arrays {', '.join(keys)}: name the vectors `vectors`")
    names = arrays.get("names")
    return None if names is None else [str(name) for name in names], arrays["vectors"]


def _from_safetensors(path: Path) -> tuple[list[str] | None, np.ndarray]:
    try:
        with safe_open(path, framework="numpy") as file:
            keys = list(file.keys())
            if "vectors" not in keys:
                raise ValueError(
                    f"{path} has tensors {', '.join(keys)}: name the vectors `vectors`"
                )
            names = (file.metadata() or {}).get("names")
            vectors: np.ndarray = file.get_tensor("vectors")
    except SafetensorError as error:
        raise ValueError(f"{path} is no sound safetensors file ({_line(error)})") from None
    return None if names is None else [str(name) for name in json.loads(names)], vectors


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
