"""Class vectors from the words of class names, so that similar names have similar vectors."""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

_SHARED_DIM = 48
_REST_DIM = 16


def name_vectors(words: Sequence[Sequence[str]]) -> np.ndarray:
    """Map the words of K classes to unit vectors, float32 [K, D], D <= 64.

    Words are weighted by count and inverse document frequency. Most dimensions are the strongest
    directions of the words that classes share (latent semantic analysis, Deerwester et al. 1990).
    The remaining dimensions are a random projection of the residual, so that names that differ only
    in rare words remain distinct. Equal words give equal vectors.
    """
    frequency = Counter(word for row in words for word in set(row))
    # Shared words come first, because only their columns need the eigendecomposition. Most words
    # are not shared.
    vocabulary = sorted(frequency, key=lambda word: (frequency[word] == 1, word))
    num_shared = sum(count > 1 for count in frequency.values())
    column = {word: i for i, word in enumerate(vocabulary)}
    table = np.zeros((len(words), len(vocabulary)))
    for row, names in enumerate(words):
        for word, count in Counter(names).items():
            table[row, column[word]] = count * (np.log(len(words) / frequency[word]) + 1)
    table /= np.linalg.norm(table, axis=1, keepdims=True)
    shared = table[:, :num_shared]
    basis = _strongest_directions(shared)
    rest = np.hstack([shared - (shared @ basis) @ basis.T, table[:, num_shared:]])
    noise = np.random.Generator(np.random.Philox(key=0)).standard_normal((len(column), _REST_DIM))
    vectors = np.hstack([shared @ basis, rest @ noise / _REST_DIM**0.5])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    # Adding 0 turns -0 into 0: the sign of a rounded number near 0 depends on the processor.
    return (vectors.round(6) + 0.0).astype(np.float32)


def _strongest_directions(table: np.ndarray) -> np.ndarray:
    """Return the eigenvectors [V, D] of the D largest eigenvalues, with a fixed sign.

    The largest entry of each eigenvector is positive.
    """
    _, directions = np.linalg.eigh(table.T @ table)
    basis = directions[:, ::-1][:, :_SHARED_DIM]
    if not basis.size:
        return basis
    largest = np.abs(basis).argmax(axis=0)
    return basis * np.sign(basis[largest, np.arange(basis.shape[1])])


def split_words(name: str) -> list[str]:
    """Split a name into words: LATIN SMALL LETTER E-BAR -> latin, small, letter, e, bar."""
    return re.findall(r"[a-z0-9]+", name.lower())
