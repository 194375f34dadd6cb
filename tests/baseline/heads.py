"""Losses and gradients in float64: every loss x class weights x logit map on three meshes."""

from itertools import product
from pathlib import Path

import numpy as np

from tests.baseline.values import Record, near, summary
from tests.heads.cases import LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS
from tests.heads.test_factored import KINDS as FACTORED_KINDS
from tests.heads.test_factored import batches, make_factored, pass_through
from tests.heads.test_hierarchical import results as hierarchical_results
from tests.heads.test_sharded import answers_of_a_rank
from tests.ranks import run_on_ranks

_MESHES = ("1", "1x2", "2x2")
_TOLERANCE = 1e-9


def record(folder: Path) -> Record:
    """Record the loss, the gradients of features, nodes and scalars, and the gradient norm."""
    cases = list(product(_MESHES, LOGIT_MAPS, LOSS_KINDS, WEIGHTINGS))
    ranks = run_on_ranks(4, answers_of_a_rank, cases)
    found: Record = {}
    for case in cases:
        parts = [rank[case] for rank in ranks if case in rank]
        (loss, _, _, *scalars), squared_norm, _, _ = parts[0]
        by_features = np.concatenate([answers[1] for answers, *_ in parts])
        # Replicas of the same rows have the same gradient.
        by_nodes = np.zeros((max(held.stop for *_, held in parts), parts[0][0][2].shape[1]))
        for answers, _, _, held in parts:
            by_nodes[held] = answers[2]
        numbers = [float(loss), *summary(by_features), *summary(by_nodes), squared_norm]
        mesh, name, kind, weighting = case
        key = f"{'1x1' if mesh == '1' else mesh}/{weighting}/{name}/{kind}"
        found[key] = near([*numbers, *(float(scalar) for scalar in scalars)], _TOLERANCE)
    return found | _factored() | _hierarchical()


def _factored() -> Record:
    """Record three steps of the factored head, with the updated rows."""
    found: Record = {}
    for kind in FACTORED_KINDS:
        head = make_factored(kind)
        numbers = []
        for features, labels in batches(3):
            loss, by_features = pass_through(head, features, labels)
            head.step(0.1, 0.02)
            numbers += [float(loss), *summary(by_features)]
        rows = head.weight.detach().numpy()
        found[f"factored/{kind}"] = near([*numbers, *summary(rows)], _TOLERANCE)
    return found


def _hierarchical() -> Record:
    found: Record = {}
    for weighting in ("utree", "vtree"):
        loss, by_features, by_nodes, scores, _ = hierarchical_results(
            weighting, 70, 4, blocks=True, sharded=False
        )
        log_p = np.concatenate([block for _, block in scores], axis=1)
        numbers = [loss, *summary(by_features), *summary(by_nodes), *summary(log_p)]
        found[f"hierarchical/{weighting}"] = near(numbers, _TOLERANCE)
    return found
