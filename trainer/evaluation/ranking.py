"""The k best classes of each row, over blocks of classes and then over the ranks that hold them."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from heads.collectives import all_gather_equal
from heads.largest import largest_columns, sort_largest

# Shape legend: N rows, C classes of a block, k places.

_NO_CLASS = torch.iinfo(torch.int64).max  # sorted behind any class of an equal score


class Ranking:
    """The k highest scores of each row over the blocks seen; ties go to the lowest class id."""

    def __init__(self, k: int, like_N: Tensor) -> None:
        """`k` places, at most the number of classes, for rows whose scores are as `like_N`."""
        self._k = k
        self._scores = like_N.new_full((len(like_N), k), -torch.inf)
        self._class_ids = torch.full_like(self._scores, _NO_CLASS, dtype=torch.int64)

    def add(self, scores_NC: Tensor, class_ids_C: Tensor, highest_N: Tensor) -> None:
        """Take in a block of classes; `highest` is the maximum of each row."""
        # Soon most blocks have nothing for most rows, and a maximum is found faster than k of them.
        rows = (highest_N >= self._scores[:, -1]).nonzero().squeeze(1)
        if len(rows) == 0:
            return
        some = scores_NC if len(rows) == len(scores_NC) else scores_NC[rows]
        best = largest_columns(some, class_ids_C, self._k)
        self._scores[rows], self._class_ids[rows] = sort_largest(
            torch.cat([self._scores[rows], some.gather(1, best)], dim=1),
            torch.cat([self._class_ids[rows], class_ids_C[best]], dim=1),
            self._k,
        )

    def over_ranks(self, group: ProcessGroup | None) -> Tensor:
        """Class ids [N, k] over the classes of all ranks, best first (collective)."""
        scores = torch.cat(all_gather_equal(self._scores, group), dim=1)
        class_ids = torch.cat(all_gather_equal(self._class_ids, group), dim=1)
        return sort_largest(scores, class_ids, self._k)[1]
