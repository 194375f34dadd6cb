"""Select and merge the k largest scores of each row. Ties go to the lowest class ID."""

import torch
from torch import Tensor

# Class IDs are exchanged as statistics, which are floats. They are encoded as two digits in this
# base, each of which is exact in float32.
_BASE = 1 << 18
_CHUNK = 1 << 22  # scores of rows with ties processed at a time


def largest_columns(scores_BC: Tensor, class_ids_C: Tensor, k: int) -> Tensor:
    """Return the columns [B, min(k, C)] of the largest scores; ties go to the lowest IDs."""
    k = min(k, len(class_ids_C))
    values, columns = scores_BC.topk(min(k + 1, len(class_ids_C)), dim=1)
    if columns.shape[1] == k or k == 0:
        return columns[:, :k]
    # torch.topk breaks ties arbitrarily. Select by ID in rows whose k-th score equals the next one,
    # or in all rows if finding these rows would make the host wait.
    if not reading_is_free(scores_BC):
        return _by_lowest_id(scores_BC, values[:, k - 1], class_ids_C, k)
    shared = (values[:, k - 1] == values[:, k]).nonzero().squeeze(1)
    for rows in shared.split(max(1, _CHUNK // len(class_ids_C))):
        columns[rows, :k] = _by_lowest_id(scores_BC[rows], values[rows, k - 1], class_ids_C, k)
    return columns[:, :k]


def reading_is_free(tensor: Tensor) -> bool:
    """Return whether the host can read `tensor` without waiting for a device."""
    return tensor.device.type == "cpu"


def sort_largest(scores_BN: Tensor, ids_BN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest scores of each row and their IDs [B, min(k, N)], sorted by descending
    score, then by ascending ID."""
    by_id = ids_BN.argsort(dim=1)
    scores, ids = scores_BN.gather(1, by_id), ids_BN.gather(1, by_id)
    by_score = scores.detach().argsort(dim=1, stable=True, descending=True)[:, :k]
    return scores.gather(1, by_score), ids.gather(1, by_score)


def encode_ids(ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Encode class IDs [...] as two exact floats [..., 2]; float32 supports IDs below 2^36."""
    return torch.stack([ids // _BASE, ids % _BASE], dim=-1).to(dtype)


def decode_ids(digits: Tensor) -> Tensor:
    """Decode the result of `encode_ids` [..., 2] to class IDs [...]."""
    digits = digits.detach().to(torch.int64)
    return digits[..., 0] * _BASE + digits[..., 1]


def _by_lowest_id(scores_RC: Tensor, last_R: Tensor, class_ids_C: Tensor, k: int) -> Tensor:
    """Return the columns [R, k] of all scores above `last_R` and, among the scores equal to it, of
    those with the lowest IDs."""
    last = last_R[:, None]
    class_ids = class_ids_C.to(torch.int32)  # half the memory; there are fewer than 2^31 classes
    others = class_ids.where(scores_RC == last, torch.iinfo(torch.int32).max)
    key = others.where(scores_RC <= last, -1)
    return key.topk(k, dim=1, largest=False).indices
