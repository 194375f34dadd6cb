"""Tests that the simulation of paper 000's synthetic data trains like kway's heads."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.papers.tree_simulation import (
    AUTHORS,
    TEXT,
    Draws,
    Regime,
    chained_vtree,
    draw,
    path_counts,
    similarities,
    train,
    train_hierarchical,
)
from heads import build_head
from heads.config import HeadConfig
from heads.tree import LabelTree, NamedTree, build_cover_tree

REGIME = Regime(n=12, d=5, k=7, rank=3)
RATES = (0.03, 0.5)


def drawn() -> Draws:
    found = draw(REGIME, [3, 4], tests=50)
    return replace(
        found,
        true=found.true.double(),
        features=found.features.double(),
        test_features=found.test_features.double(),
    )


def weights_of_head(
    draws: Draws, number: int, rate: float, loss: str, tree: LabelTree | None, folder: Path
) -> tuple[torch.Tensor, float]:
    """Train a ClassHead from zero. Return the averaged node vectors and the accuracy."""
    num_classes, dim = draws.true.shape[1:]
    weights: dict[str, object] = {"kind": "dense"}
    if tree is not None:
        file = folder / f"{number}.safetensors"
        names = tuple(str(i) for i in range(num_classes))
        NamedTree(tree, names, ("",) * (tree.num_nodes - num_classes)).save(file)
        weights = {"kind": "vtree", "tree": {"file": str(file)}}
    head = build_head(
        HeadConfig.model_validate(
            {"weights": weights, "loss": {"kind": loss}, "bias": False, "init_std": 0.0}
        ),
        dim=dim,
        num_classes=num_classes,
        label_vectors=draws.vectors[number].astype(np.float32),
        mesh=None,
        seed=0,
        device="cpu",
    ).double()
    with torch.no_grad():
        head.weight.zero_()
    optimizer = torch.optim.SGD(head.parameters(), lr=rate)
    total = torch.zeros_like(head.weight)
    for row in range(REGIME.n):
        total += head.weight.detach()
        optimizer.zero_grad()
        x, y = draws.features[number, row : row + 1], draws.labels[number, row : row + 1]
        head(x, y).backward()
        optimizer.step()
    with torch.no_grad():
        head.weight.copy_(total / REGIME.n)
        blocks = list(head.score_blocks(draws.test_features[number]))
    scores = torch.cat([block.scores for block in blocks], 1)
    classes = torch.cat([block.class_ids for block in blocks])
    correct = classes[scores.argmax(1)] == draws.test_labels[number]
    return head.weight.detach(), float(correct.double().mean())


@pytest.mark.parametrize("kind", ["ce", "vtree", "chains", "simloss", "hierarchical_softmax"])
def test_the_simulation_trains_like_a_class_head(kind: str, tmp_path: Path) -> None:
    draws = drawn()
    covers = [build_cover_tree(v, base=1.3, metric="euclidean") for v in draws.vectors]
    trees = [
        {"vtree": c.vtree(), "chains": chained_vtree(c), "hierarchical_softmax": c.vtree()}.get(
            kind
        )
        for c in covers
    ]
    if kind == "hierarchical_softmax":
        found = train_hierarchical(draws, [c.vtree() for c in covers], RATES, TEXT)
    else:
        counts = [
            path_counts(kind if kind in ("vtree", "chains") else "ce", v, 1.3)
            for v in draws.vectors
        ]
        similarity = similarities(draws) if kind == "simloss" else None
        found = train(draws, counts, RATES, TEXT, similarity=similarity)
    loss = kind if kind in ("simloss", "hierarchical_softmax") else "ce"
    for number in range(2):
        for column, rate in enumerate(RATES):
            nodes, accuracy = weights_of_head(draws, number, rate, loss, trees[number], tmp_path)
            norm = float(found.norm[number, column])
            # The label vectors of SimLoss are float32.
            assert norm == pytest.approx(
                float(nodes.norm()), rel=1e-6 if loss == "simloss" else 1e-10
            )
            assert float(found.accuracy[number, column]) == pytest.approx(accuracy)


@pytest.mark.parametrize("batch", [1, 4])
def test_momentum_weight_decay_and_batches_equal_those_of_torch(batch: int) -> None:
    draws, protocol = drawn(), replace(AUTHORS, batch=batch)
    counts = [path_counts("authors", v, 2.0) for v in draws.vectors]
    found = train(draws, counts, RATES, protocol)
    for number, of_draw in enumerate(counts):
        paths = torch.from_numpy(of_draw)
        bound = REGIME.d**-0.5
        start = np.random.default_rng([number, of_draw.shape[1]]).uniform(
            -bound, bound, (of_draw.shape[1], REGIME.d)
        )
        for column, rate in enumerate(RATES):
            nodes = torch.from_numpy(start.copy()).requires_grad_()
            optimizer = torch.optim.SGD(
                [nodes], lr=rate, momentum=protocol.momentum, weight_decay=protocol.weight_decay
            )
            for first in range(0, REGIME.n, batch):
                x = draws.features[number, first : first + batch]
                logits = x @ (paths @ nodes).T
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(
                    logits, draws.labels[number, first : first + batch]
                ).backward()
                optimizer.step()
            norm = float(found.norm[number, column])
            assert norm == pytest.approx(float(nodes.detach().norm()), rel=1e-10)


def test_pseudoclasses_of_the_authors_share_a_vector_per_center() -> None:
    vectors = np.array([[0.0], [1.0], [5.0], [5.2]])
    chains, authors = path_counts("chains", vectors, 2.0), path_counts("authors", vectors, 2.0)
    assert chains.max() == 1
    assert authors.max() > 1
    assert (chains.sum(1) == authors.sum(1)).all()
