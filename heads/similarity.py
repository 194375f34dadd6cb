"""Similarity of classes according to their label vectors, and similarity accuracy (SA).

SA is the mean similarity of the predicted class to the true class. The K x K matrix of similarities
is never computed.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum

_CHUNK = 1 << 16  # pairs of classes processed at a time; bounds the memory of their vectors


def similarity(vectors: Tensor, a: Tensor, b: Tensor, lower: float = 0.0) -> Tensor:
    """Return the similarity [n] of the classes `a` [n] and `b` [n] with label vectors [K, d].

    It is max(0, (cos - lower) / (1 - lower)), as in SimLoss, for a `lower` of at least -1 and below
    1. The similarity of a class to itself is exactly 1. A class with a zero vector has similarity 0
    to all other classes. Raises ValueError for vectors that are not finite.
    """
    found = []
    for of_a, of_b in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        left, right = unit_rows(vectors[of_a], of_a), unit_rows(vectors[of_b], of_b)
        cosine, has_direction = (left * right).sum(1), left.any(1) & right.any(1)
        found.append(of_cosines(cosine, lower).where(has_direction, 0).where(of_a != of_b, 1))
    return torch.cat(found)


def similarity_accuracy(
    vectors: Tensor,
    labels: Tensor,
    predicted: Tensor,
    lower: float = 0.0,
    *,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Return the mean `similarity` of `predicted` [n] to `labels` [n], a float64 scalar.

    The mean is over the samples of all ranks of `group` (collective). Only the vectors of the given
    classes are read, so `vectors` may be on another device or in a memory-mapped file.
    """
    own = similarity(vectors, labels.to(vectors.device), predicted.to(vectors.device), lower)
    count = torch.tensor(float(len(labels)), dtype=torch.float64)
    both = torch.stack([own.double().sum().cpu(), count]).to(labels.device)
    total, num_samples = all_reduce_sum(both, group)
    if num_samples == 0:
        raise ValueError("similarity accuracy needs at least one sample, got 0")
    return total / num_samples


def of_cosines(cosines: Tensor, lower: float) -> Tensor:
    """Convert cosines to similarities, max(0, (cos - lower) / (1 - lower)), in place."""
    return cosines.sub_(lower).div_(1 - lower).clamp_(0, 1)


def unit_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Scale label vectors [n, d] of the classes `ids` [n] to length 1, in at least float32.

    A zero vector stays zero. Raises ValueError for a vector that is not finite.
    """
    broken = (~rows.isfinite().all(1)).nonzero()
    if len(broken):
        raise ValueError(
            f"the label vector of class {int(ids[broken[0, 0]])} is not finite: fix it, or set it "
            "to zeros"
        )
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    # Divide by the largest entry first: squares of very large or small entries would overflow or
    # underflow.
    rows = _divide(rows, rows.abs().amax(1, keepdim=True))
    return _divide(rows, rows.norm(dim=1, keepdim=True))


def _divide(rows: Tensor, by: Tensor) -> Tensor:
    return rows / by.where(by > 0, 1)
