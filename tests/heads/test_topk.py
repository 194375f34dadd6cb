"""The k largest scores of a row. Ties go to the lowest ID."""

import pytest
import torch

from heads.topk import largest_columns, sort_largest


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("k", [1, 3, 7, 12, 40])
@pytest.mark.parametrize("levels", [1, 3, 1000])
@pytest.mark.parametrize("waits", [True, False])
def test_ties_go_to_the_lowest_ids_in_any_order_of_columns(k, levels, waits, monkeypatch):
    monkeypatch.setattr("heads.topk.reading_is_free", lambda tensor: waits)
    scores = torch.randint(levels, (30, 12), generator=generator()).float()
    ids = torch.randperm(500, generator=generator())[:12]
    columns = largest_columns(scores, ids, k)
    assert columns.shape == (30, min(k, 12))
    for row, found in zip(scores.tolist(), columns.tolist(), strict=True):
        best = sorted(range(12), key=lambda column: (-row[column], int(ids[column])))[:k]
        assert sorted(found) == sorted(best)


def test_minus_infinity_is_a_valid_score():
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, -torch.inf]])
    assert sorted(largest_columns(scores, torch.tensor([9, 4, 2, 3]), 3)[0].tolist()) == [1, 2, 3]


def test_empty_batches_and_empty_blocks_give_empty_results():
    assert largest_columns(torch.empty(0, 5), torch.arange(5), 3).shape == (0, 3)
    assert largest_columns(torch.empty(4, 0), torch.arange(0), 3).shape == (4, 0)
    values, ids = sort_largest(torch.empty(4, 0), torch.empty(4, 0, dtype=torch.long), 3)
    assert values.shape == ids.shape == (4, 0)
