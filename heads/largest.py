"""The k largest scores of each row, with ties going to the lowest class id, and their merge."""

import torch
from torch import Tensor

# Ids travel among statistics, which are floats: two digits of this base are exact in float32.
_BASE = 1 << 18


def largest_columns(scores_BC: Tensor, class_ids_C: Tensor, k: int) -> Tensor:
    """Columns [B, min(k, C)] of the highest scores, of equal ones those with the lowest ids."""
    k = min(k, len(class_ids_C))
    values, columns = scores_BC.topk(k, dim=1)
    # topk breaks ties as it likes: where the last place is shared, sort that row in full.
    last = values[:, -1:]
    shared = (scores_BC == last).sum(1) > (values == last).sum(1)
    if shared.any():
        by_id = class_ids_C.argsort()
        rows = scores_BC[shared][:, by_id]
        columns[shared] = by_id[rows.argsort(dim=1, stable=True, descending=True)[:, :k]]
    return columns


def sort_largest(scores_BN: Tensor, ids_BN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their ids [B, min(k, N)]: by score, then by lowest id."""
    by_id = ids_BN.argsort(dim=1)
    scores, ids = scores_BN.gather(1, by_id), ids_BN.gather(1, by_id)
    by_score = scores.detach().argsort(dim=1, stable=True, descending=True)[:, :k]
    return scores.gather(1, by_score), ids.gather(1, by_score)


def encode_ids(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Class ids [...] as two exact floats [..., 2]; up to 2^36 in float32."""
    return torch.stack([ids // _BASE, ids % _BASE], dim=-1).to(dtype)


def decode_ids(digits: Tensor) -> Tensor:
    """What `encode_ids` encoded."""
    digits = digits.detach().to(torch.int64)
    return digits[..., 0] * _BASE + digits[..., 1]
