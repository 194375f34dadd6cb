"""Load label vectors, one per class, from files, and project them to fewer dimensions.

Vectors without names are rows in the order of the class list. Vectors with names are matched to the
class names, by the entire name or as a mean over its words. Matching ignores case, U+FE0F (which
selects the emoji form of a character), and the difference between underscores and spaces. If
several names match, the one with identical spelling is used, otherwise the first one, because files
list frequent words first.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heads.tree.word_files import WORD_FILE_SUFFIXES, is_word_file, read_words

FloatVectors = NDArray[np.float32]
Missing = Literal["error", "mean", "zero"]

_BETWEEN_WORDS = re.compile(r"[\s_,;/()]+")
_INSIDE_WORDS = re.compile(r"[-–'’.]+")
_NAMES_SHOWN = 3


def load_label_vectors(
    path: str | Path, class_names: Sequence[str], *, missing: Missing = "error"
) -> tuple[FloatVectors, list[str]]:
    """Return float32 vectors [K, D] in the order of `class_names`, and the names without a vector.

    Word vectors (`.bin` word2vec, `.vec` fastText, `.txt` GloVe or word2vec text, each also `.gz`)
    and `.npz` files with an array `names` are matched by name. A `.npy` file, or a `.npz` file
    without names, must contain K rows in class order.

    `missing` selects what happens if a name has no vector: an error is raised, or the name gets the
    mean of the other vectors or zeros. Raises ValueError for a missing vector with
    `missing="error"`, for an array of the wrong shape, and if no name has a vector.
    """
    needed = {_key(form) for name in class_names for form in (name, *_words(name), *_parts(name))}
    needed.discard("")
    names, vectors = read_label_vectors(path, lambda name: _key(name) in needed)
    if names is None:
        if len(vectors) != len(class_names):
            raise ValueError(
                f"{path} has {len(vectors)} rows without names, but there are {len(class_names)} "
                "classes: write one row per class, in the order of the class list"
            )
        return vectors, []
    by_spelling: dict[str, FloatVectors] = {}
    by_key: dict[str, FloatVectors] = {}
    for name, vector in zip(names, vectors, strict=True):
        by_spelling.setdefault(name, vector)
        by_key.setdefault(_key(name), vector)

    def find(name: str) -> FloatVectors | None:
        found = by_spelling.get(name)
        return by_key.get(_key(name)) if found is None else found

    def vector_of(name: str) -> FloatVectors | None:
        """Return the mean over the words of a name, and for a word without a vector, the mean over
        its parts, which hyphens, apostrophes and periods separate."""
        if (exact := find(name)) is not None:
            return exact
        words = [(word, find(word)) for word in _words(name)]
        return _mean(_mean(map(find, _parts(word))) if one is None else one for word, one in words)

    found = [vector_of(name) for name in class_names]
    known = [vector for vector in found if vector is not None]
    unmatched = [name for name, vector in zip(class_names, found, strict=True) if vector is None]
    if not known:
        raise ValueError(
            f"{path} does not contain a vector for any of the {len(class_names)} class names, such "
            f"as {class_names[0]!r}: use a file with these names"
        )
    if unmatched and missing == "error":
        shown = ", ".join(map(repr, unmatched[:_NAMES_SHOWN]))
        raise ValueError(
            f"{path} does not contain vectors for {len(unmatched)} of {len(class_names)} class "
            f"names ({shown}{', …' if len(unmatched) > _NAMES_SHOWN else ''}): rename these "
            "classes, or set missing to mean or zero"
        )
    filler = np.stack(known).mean(0) if missing == "mean" else np.zeros_like(known[0])
    return np.stack([filler if vector is None else vector for vector in found]), unmatched


def read_label_vectors(
    path: str | Path, is_needed: Callable[[str], bool] = lambda _: True
) -> tuple[list[str] | None, FloatVectors]:
    """Return the names of a file (None for a file without names) and its float32 vectors [N, D],
    from a file of word vectors only those that `is_needed` accepts.

    Raises FileNotFoundError if the file does not exist, and ValueError if it does not contain
    finite numbers [N, D].
    """
    path = Path(path)
    if is_word_file(path):
        entries = list(read_words(path, is_needed))
        return [name for name, _ in entries], np.array([vector for _, vector in entries])
    if path.suffix not in (".npy", ".npz"):
        known = ", ".join((".npy", ".npz", *WORD_FILE_SUFFIXES))
        raise ValueError(
            f"label vectors {path} have an unknown suffix {path.suffix!r}: use one of {known}"
        )
    names, array = _read_arrays(path)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiu":
        raise ValueError(
            f"{path} contains {array.dtype} of shape {list(array.shape)}: write real numbers of "
            "shape [classes, dim]"
        )
    vectors = array.astype(np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError(
            f"{path} contains NaN, infinity or numbers outside the range of float32: fix the file"
        )
    if names is not None and len(names) != len(vectors):
        raise ValueError(
            f"{path} has {len(names)} names, but {len(vectors)} vectors: write one name per vector"
        )
    return names, vectors


def project(vectors: ArrayLike, dim: int) -> FloatVectors:
    """Scale rows [K, D] to unit length and project them to their first `dim` principal components.

    Returns float32 [K, dim]. The sign of each component is chosen so that its largest entry is
    positive, which makes results the same on all platforms. Raises ValueError unless
    1 <= dim <= min(K, D).
    """
    rows = np.asarray(vectors, np.float64)
    if not 1 <= dim <= min(rows.shape):
        raise ValueError(
            f"cannot project {len(rows)} vectors of {rows.shape[1]} dimensions to {dim}: "
            f"pass a number from 1 to {min(rows.shape)}"
        )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    rows -= rows.mean(0)
    _, axes = np.linalg.eigh(rows.T @ rows)
    axes = axes[:, : -dim - 1 : -1]
    largest = axes[np.abs(axes).argmax(0), np.arange(dim)]
    return (rows @ (axes * np.sign(largest))).astype(np.float32)


def _key(name: str) -> str:
    """Return the normalized name; names with the same key match."""
    text = unicodedata.normalize("NFC", name.replace("\ufe0f", "")).casefold()
    return " ".join(text.replace("_", " ").split())


def _words(name: str) -> list[str]:
    return [word for word in _BETWEEN_WORDS.split(name) if word]


def _parts(name: str) -> list[str]:
    """Return the parts of the words of a name."""
    return [part for word in _words(name) for part in _INSIDE_WORDS.split(word) if part]


def _mean(vectors: Iterable[FloatVectors | None]) -> FloatVectors | None:
    """Return the mean of the vectors that are not None; None if there are none."""
    known = [vector for vector in vectors if vector is not None]
    return np.stack(known).astype(np.float64).mean(0).astype(np.float32) if known else None


def _read_arrays(path: Path) -> tuple[list[str] | None, np.ndarray]:
    """Return the names (None: there are none) and the vectors of a .npy or .npz file."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return None, loaded
        with loaded:
            arrays = {key: loaded[key] for key in loaded.files}
    except OSError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise exceptions without a common base
        line = str(error).partition("\n")[0]
        raise ValueError(
            f"{path} is not a valid {path.suffix} file ({line}): write it again"
        ) from None
    if "vectors" not in arrays:
        raise ValueError(
            f"{path} has only the arrays {', '.join(arrays)}: rename the array of vectors to "
            "`vectors`"
        )
    names = arrays.get("names")
    return None if names is None else [str(name) for name in names], arrays["vectors"]
