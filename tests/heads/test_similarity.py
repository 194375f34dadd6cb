"""Similarity accuracy matches its definition with the full K x K matrix."""

import math

import pytest
import torch

import heads.similarity
from heads.similarity import similarity, similarity_accuracy


def naive_matrix(vectors: torch.Tensor, lower: float) -> torch.Tensor:
    """S_ij = max(0, (cos(v_i, v_j) - lower) / (1 - lower)); 0 for zero vectors, S_ii = 1."""
    num = len(vectors)
    matrix = torch.eye(num, dtype=torch.float64)
    for i in range(num):
        for j in range(num):
            lengths = vectors[i].norm() * vectors[j].norm()
            if i != j and lengths > 0:
                cosine = (vectors[i] @ vectors[j] / lengths).item()
                matrix[i, j] = max(0.0, (cosine - lower) / (1 - lower))
    return matrix


@pytest.mark.parametrize("lower", [-1.0, 0.0, 0.5, 0.99])
@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_similarity_matches_the_full_matrix(lower, chunk, monkeypatch):
    monkeypatch.setattr(heads.similarity, "_CHUNK", chunk)
    vectors = torch.randn(12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vectors[4] = vectors[9] = 0
    vectors[5] = 2 * vectors[6]
    matrix = naive_matrix(vectors, lower)
    a, b = torch.cartesian_prod(torch.arange(12), torch.arange(12)).T
    assert similarity(vectors, a, b, lower) == pytest.approx(matrix.flatten(), abs=1e-12)
    sampled = torch.randint(0, 12, (2, 100), generator=torch.Generator().manual_seed(2))
    labels, predicted = sampled
    expected = matrix[labels, predicted].mean().item()
    accuracy = similarity_accuracy(vectors, labels, predicted, lower)
    assert accuracy.item() == pytest.approx(expected, abs=1e-12)


def test_invalid_input_is_rejected():
    vectors, a = torch.eye(3), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="at least one sample"):
        similarity_accuracy(vectors, a[:0], a[:0])
    vectors[1, 0] = math.nan
    with pytest.raises(ValueError, match="label vector of class 1 is not finite"):
        similarity(vectors, a, a)
