"""Similarity of classes according to their label vectors, and similarity accuracy (SA).

SA is the mean similarity of the predicted class to the true class. The K x K matrix of similarities
is never computed.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_reduce_sum
from heads.engine.inputs import class_ids, is_integral

_CHUNK = 1 << 16  # pairs of classes processed at a time; bounds the memory of their vectors


def similarity(vectors: Tensor, a: Tensor, b: Tensor, lower: float = 0.0) -> Tensor:
    """Return the similarity [n] of the classes `a` [n] and `b` [n] with label vectors [K, d].

    It is max(0, (cos - lower) / (1 - lower)), as in SimLoss. The similarity of a class to itself is
    exactly 1. A class with a zero vector has similarity 0 to all other classes. Raises ValueError
    for a `lower` outside [-1, 1), for classes outside 0..K-1 and for vectors that are not finite.
    """
    if not -1 <= lower < 1:
        raise ValueError(f"lower is {lower}: pass a cosine of at least -1 and below 1")
    if a.shape != b.shape or a.dim() != 1 or not (is_integral(a) and is_integral(b)):
        raise ValueError(
            f"class ids have shapes {tuple(a.shape)} and {tuple(b.shape)} and dtypes {a.dtype} and "
            f"{b.dtype}: pass two integer vectors of the same length"
        )
    a, b = class_ids(a), class_ids(b)
    for ids in (a, b):
        outside = ids[(ids < 0) | (ids >= len(vectors))]
        if len(outside):
            raise ValueError(
                f"there is no label vector for class {int(outside[0])}: pass class ids from 0 to "
                f"{len(vectors) - 1}"
            )
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
