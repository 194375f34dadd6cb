"""Paper 003's algorithms against the definition of the loss, and its Tables 3 to 5 at toy size."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor

from experiments.papers.experiment import Experiment
from experiments.papers.experiments import topk_reference as reference
from experiments.papers.experiments.topk_algorithms import EXPERIMENT, trained_scores
from experiments.papers.section import Section
from heads.losses import Block, Rows, SmoothTopK

_ALGORITHMS = [
    reference.summation,
    reference.divide_and_conquer,
    reference.with_custom_backward,
]


def _by_definition(scores: Tensor, k: int) -> Tensor:
    terms = scores.exp()
    return sum(terms[:, list(chosen)].prod(1) for chosen in combinations(range(9), k)).log()


@pytest.mark.parametrize("polynomials", _ALGORITHMS)
@pytest.mark.parametrize("k", [1, 4, 9])
def test_an_algorithm_computes_the_sum_over_all_tuples(
    polynomials: reference.Polynomials, k: int
) -> None:
    scores = torch.randn(3, 9, dtype=torch.float64)
    lower, upper = polynomials(scores, k)
    torch.testing.assert_close(upper, _by_definition(scores, k))
    if k > 1:
        torch.testing.assert_close(lower, _by_definition(scores, k - 1))


def test_algorithm_2_returns_the_same_gradient_as_autograd() -> None:
    scores = torch.randn(4, 13, dtype=torch.float64, requires_grad=True)
    gradients = []
    for polynomials in (reference.divide_and_conquer, reference.with_custom_backward):
        lower, upper = polynomials(scores, 5)
        gradients.append(torch.autograd.grad((2 * upper - lower).sum(), scores)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_our_loss_and_gradient_match_those_of_the_paper(tau: float) -> None:
    scores, labels = trained_scores(6, 50, gain=5.0, seed=1)
    logits = scores.requires_grad_()
    theirs = reference.smooth_topk(logits, labels, reference.divide_and_conquer, k=5, tau=tau)
    classes = torch.arange(50)
    block = Block.of(classes, labels, labels, logits)
    loss = SmoothTopK(5, tau)
    ours = loss.value(loss.statistics(logits, block), Rows(50, labels))
    torch.testing.assert_close(ours, theirs)
    by_logits, by_true = torch.autograd.grad(ours, [logits, block.true])
    total = by_logits.index_put((torch.arange(6), labels), by_true, accumulate=True)
    torch.testing.assert_close(total, torch.autograd.grad(theirs, logits)[0])


def test_tables_3_to_5_contain_every_algorithm(conducted: Callable[[Experiment], Section]) -> None:
    section = conducted(EXPERIMENT)
    forward, backward, losses = section.tables
    assert [row[0].split(" (")[0] for row in forward.rows] == [
        "summation",
        "divide and conquer",
    ]
    assert len(backward.rows) == 2
    assert losses.rows[0][2:] == [
        *("yes (yes)", "yes (yes)", "yes (no)", "no (no)", "no (no)", "no (no)")
    ]
    assert all(cell.startswith("yes") for row in losses.rows[2:] for cell in row[2:])
    verdicts = {claim.statement: claim.verdict for claim in section.claims}
    stable = [verdict for statement, verdict in verdicts.items() if "is stable" in statement]
    assert stable == ["holds"]
