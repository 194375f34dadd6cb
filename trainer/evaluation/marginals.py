"""Marginalised top-k prediction from several views (crops) of a picture (003, 5.2 and appendix C).

A view gives a k-tuple of classes a probability in proportion to exp(sum of its scores / t), and a
class that of being in the tuple, p_i = e_i sigma_(k-1)(e without e_i) / sigma_k(e). These are
averaged over the views; the k classes of the highest means are predicted. Of one view this is top-k
itself: p_i - p_j = (e_i - e_j) sigma_(k-1)(e without e_i and e_j) / sigma_k(e), so that classes
rank as their scores do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from heads import ClassHead
from heads.collectives import all_gather_equal, group_rank
from heads.losses.symmetric import (
    SymmetricPolynomials,
    merge_polynomials,
    no_scores,
    symmetric_polynomials,
)
from trainer.evaluation.class_scores import Ranking
from trainer.evaluation.features import SplitRows

# Shape legend: n pictures, V views of one, r pictures worked on together, B = r x V, C classes.

_VIEWS_AT_ONCE = 2048  # more read the classes' rows less often and leave fewer classes a block
_COPIES = 8  # of a block's scores at one time, in backward


@dataclass(frozen=True)
class MarginalTopK:
    """Which k, each from 1 to 100, and the `temperature` t that divides scores: 1 in appendix C,
    k tau in the loss `smooth_topk`."""

    ks: tuple[int, ...]
    temperature: float = 1.0


def num_pieces(rows: SplitRows) -> int:
    """Pieces that `marginal_top` works in."""
    return len(rows.features.split(_images_at_once(rows)))


def marginal_top(
    head: ClassHead, rows: SplitRows, k: int, temperature: float, before_piece: Callable[[], None]
) -> Tensor:
    """The k classes [n, k] of the highest mean marginals, best first (collective over the class
    group, whose ranks have the same rows). k is below the number of classes.

    Scores are computed twice: for each view's polynomials over all classes, then for the marginals
    in the light of those. Never n x K.
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
    at_once = max(1, head.engine.memory_bytes // (_COPIES * 4 * max(1, len(views))))
    nothing = torch.full((len(views),), -1, device=views.device)
    scale = 1 / temperature

    def polynomials(scores_BC: Tensor) -> SymmetricPolynomials:
        return symmetric_polynomials(scores_BC, nothing, k, scale)

    parts = [polynomials(block.scores) for block in head.score_blocks(views, at_once)]
    like = head.weight.new_zeros(len(views))
    parts = parts or [no_scores(like, k)]
    others = _of_other_ranks(merge_polynomials(parts, scale), head)
    gradients = _gradients(parts, others, scale)
    top = Ranking(k, like.view(features_rVd.shape[:2])[:, 0])
    for block, gradient in zip(head.score_blocks(views, at_once), gradients, strict=False):
        scores = block.scores.detach().requires_grad_()
        with torch.enable_grad():
            ratios = polynomials(scores).log_ratios
        (marginals,) = torch.autograd.grad(ratios, scores, gradient)
        mean = (marginals / scale).view(*features_rVd.shape[:2], -1).mean(1)
        top.add(mean, block.class_ids, mean.amax(1))
    return top.over_ranks(group)


def _of_other_ranks(mine: SymmetricPolynomials, head: ClassHead) -> list[SymmetricPolynomials]:
    group = head.engine.class_group
    largest = all_gather_equal(mine.largest, group)
    ratios = all_gather_equal(mine.log_ratios, group)
    everyone = [SymmetricPolynomials(*part) for part in zip(largest, ratios, strict=True)]
    own = group_rank(group)
    return everyone[:own] + everyone[own + 1 :]


def _gradients(
    parts: list[SymmetricPolynomials], others: list[SymmetricPolynomials], scale: float
) -> tuple[Tensor, ...]:
    """d log sigma_k of all classes / d log ratios of each part, [B, k + 1] each."""
    leaves = [part.log_ratios.detach().requires_grad_() for part in parts]
    mine = [
        SymmetricPolynomials(part.largest, leaf) for part, leaf in zip(parts, leaves, strict=True)
    ]
    with torch.enable_grad():
        total = merge_polynomials([*mine, *others], scale).log_ratios[:, -1].sum()
    return torch.autograd.grad(total, leaves)
