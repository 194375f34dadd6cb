"""Token lists of different lengths as the rectangles that a model takes."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

# Few widths, which compiled models and matrix units like.
_MULTIPLE = 8


def pad_tokens(
    tokens: Sequence[Sequence[int]], pad_id: int, *, max_length: int
) -> dict[str, Tensor]:
    """Token ids of b texts, none longer than `max_length`, -> `input_ids` and `attention_mask`,
    int64 [b, T].

    T is the longest length, rounded up to a multiple of 8, but not beyond `max_length`: a model has
    no more positions. The mask is 0 where `pad_id` fills.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    longest = int(lengths.max(initial=1))
    assert longest <= max_length
    width = min(-(-longest // _MULTIPLE) * _MULTIPLE, max_length)
    mask = np.arange(width) < lengths[:, None]
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(tokens), np.int64, int(lengths.sum()))
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }
