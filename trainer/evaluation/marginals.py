"""Marginalized top-k prediction from several views (crops) of an image (paper 003, section 5.2 and
appendix C).

In each view, the probability of a k-tuple of classes is proportional to exp(sum of their scores /
t). The marginal probability that class i is in the tuple is p_i = e_i sigma_(k-1)(e without e_i) /
sigma_k(e), where e = exp(scores / t). The marginals are averaged over the views, and the k classes
with the highest means are predicted. With one view this is plain top-k: p_i - p_j = (e_i - e_j)
sigma_(k-1)(e without e_i and e_j) / sigma_k(e), so classes are ordered by their scores.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from heads import ClassHead
from heads.collectives import all_gather_equal, group_rank
from heads.losses.log_polynomials import log_polynomials
from heads.losses.symmetric import (
    SymmetricStatistics,
    merge_statistics,
    no_scores,
    symmetric_statistics,
)
from heads.rows.node_values import wide_dtype
from trainer.evaluation.class_scores import Ranking
from trainer.evaluation.features import SplitRows

# Shape legend: n images, V views of each, r images in one batch, B = r x V, C classes.

_VIEWS_AT_ONCE = 2048  # with more views, class rows are read less often, but in smaller blocks
_COPIES = 8  # copies of a block's scores in memory at the same time during backward


def num_pieces(rows: SplitRows) -> int:
    """Return the number of pieces in which `marginal_top` processes the rows."""
    return len(rows.features.split(_images_at_once(rows)))


def marginal_top(
    head: ClassHead, rows: SplitRows, k: int, temperature: float, before_piece: Callable[[], None]
) -> Tensor:
    """Return the k classes [n, k] with the highest mean marginals, best first. k must be less than
    the number of classes, and at most 100. The `temperature` t is 1 in appendix C and k tau in the
    loss `smooth_topk`. The call is collective over the class group, whose ranks must all pass the
    same rows.

    Scores are computed twice: first for the polynomials of each view over all classes, then for the
    marginals, which depend on these polynomials. The full matrix of scores, n x K, is never in
    memory.
    """
    found = []
    for features in rows.features.split(_images_at_once(rows)):
        before_piece()
        found.append(_top_of(head, features, k, temperature))
    return torch.cat(found)


def _images_at_once(rows: SplitRows) -> int:
    return max(1, _VIEWS_AT_ONCE // rows.features.shape[1])


def _top_of(head: ClassHead, features_rVd: Tensor, k: int, temperature: float) -> Tensor:
    group, views = head.engine.class_group, features_rVd.flatten(0, 1)
    at_once = max(1, head.engine.logit_bytes // (_COPIES * 4 * max(1, len(views))))
    nothing = torch.full((len(views),), -1, device=views.device)
    scale = 1 / temperature

    def statistics(scores_BC: Tensor) -> SymmetricStatistics:
        return symmetric_statistics(scores_BC, nothing, k, scale)

    parts = [statistics(block.scores) for block in head.score_blocks(views, at_once)]
    like = views.new_zeros(len(views), dtype=wide_dtype(head.weight.dtype))
    parts = parts or [no_scores(like, k)]
    others = _of_other_ranks(merge_statistics(parts, scale), head)
    gradients = _gradients(parts, others, scale)
    top = Ranking(k, like.view(features_rVd.shape[:2])[:, 0])
    for block, gradient in zip(head.score_blocks(views, at_once), gradients, strict=False):
        scores = block.scores.detach().requires_grad_()
        with torch.enable_grad():
            part = statistics(scores)
        (marginals,) = torch.autograd.grad(part, scores, gradient)
        mean = (marginals / scale).view(*features_rVd.shape[:2], -1).mean(1)
        top.add(mean, block.class_ids, mean.amax(1))
    return top.over_ranks(group)


def _of_other_ranks(mine: SymmetricStatistics, head: ClassHead) -> list[SymmetricStatistics]:
    group = head.engine.class_group
    every = zip(*(all_gather_equal(stat, group) for stat in mine), strict=True)
    all_ranks = [SymmetricStatistics(*part) for part in every]
    own = group_rank(group)
    return all_ranks[:own] + all_ranks[own + 1 :]


def _gradients(
    parts: list[SymmetricStatistics], others: list[SymmetricStatistics], scale: float
) -> list[SymmetricStatistics]:
    """Return the gradients of log sigma_k over all classes with respect to the statistics of each
    part.
    """
    mine = [
        SymmetricStatistics(*(stat.detach().requires_grad_() for stat in part)) for part in parts
    ]
    with torch.enable_grad():
        _, last = log_polynomials(merge_statistics([*mine, *others], scale), scale)
    leaves = [stat for part in mine for stat in part]
    grads = torch.autograd.grad(last.sum(), leaves)
    return [SymmetricStatistics(*pair) for pair in zip(grads[::2], grads[1::2], strict=True)]
