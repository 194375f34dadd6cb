"""Paper 000's synthetic data (6.1.1), and heads trained on it as in the paper's theory.

The features are given, so there is no backbone and no trainer. Heads from `heads.build_head`, which
have no bias and are initialized to zero, take one SGD step per sample in a single pass. Both the
final weights and the average of the weights before each step (Shalev-Shwartz and Ben-David 2014,
chapter 14) are tested.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.papers.job import Folders, Measures
from heads.tree import CoverTree, LabelTree, NamedTree, build_cover_tree

if TYPE_CHECKING:
    from heads import ClassHead

BASE = 1.3
TREES = ("vtree", "utree", "vtree_chains")
_WITH_TREE = (*TREES, "hierarchical_softmax")
LOSSES = ("vtree", "utree", "ce", "simloss", "hierarchical_softmax")


@dataclass(frozen=True)
class Regime:
    """n training samples and `tests` test samples of k classes in d dimensions, x ~ N(w_y, sigma).

    The label vectors are (1 - epsilon) W + epsilon W', where W' is another draw (Eq. 21 of paper
    000).
    """

    n: int = 100
    d: int = 64
    k: int = 10
    sigma: float = 1.0
    tests: int = 10_000
    epsilon: float = 0.0


@dataclass(frozen=True)
class Arm:
    """A head: one of `LOSSES` or `vtree_chains`. `base`: the base of its cover tree."""

    loss: str
    base: float = BASE


@dataclass(frozen=True)
class Drawn:
    """One draw: W [k, d], label vectors, and training and test samples."""

    true: np.ndarray
    label_vectors: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray

    def bayes_accuracy(self) -> float:
        """Return the accuracy of the Bayes-optimal classifier, which picks the nearest row of W."""
        offset = np.square(self.true).sum(1) / 2
        chosen = (self.test_features @ self.true.T - offset).argmax(1)
        return float((chosen == self.test_labels).mean())


def draw(regime: Regime, number: int) -> Drawn:
    """Return draw `number`. W does not depend on n, sigma, tests or epsilon."""
    shape = regime.k, regime.d
    true, other = (
        np.random.default_rng([number, *shape, which]).normal(size=shape) for which in (0, 1)
    )
    train, test = (
        _sampled(true, regime.sigma, size, np.random.default_rng([number, *shape, which]))
        for size, which in ((regime.n, 2), (regime.tests, 3))
    )
    vectors = (1 - regime.epsilon) * true + regime.epsilon * other
    return Drawn(true, vectors.astype(np.float32), *train, *test)


def _sampled(
    true: np.ndarray, sigma: float, size: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.integers(len(true), size=size)
    noise = rng.normal(size=(size, true.shape[1]))
    return (true[labels] + sigma * noise).astype(np.float32), labels


def chained_vtree(cover: CoverTree) -> LabelTree:
    """Return the V-tree of the explicit cover tree, with a pseudoclass per class and level.

    `CoverTree.vtree` omits pseudoclasses that have a single child.
    """
    num_classes, num_levels = len(cover.level), int(cover.level.max()) + 1
    nodes = [(c, level) for c in range(num_classes) for level in range(cover.level[c], num_levels)]
    node_of = {node: num_classes + number for number, node in enumerate(nodes)}
    parents = [node_of[c, num_levels - 1] for c in range(num_classes)]
    for c, level in nodes:
        above = c if level > cover.level[c] else int(cover.center_parent[c])
        parents.append(-1 if above < 0 else node_of[above, level - 1])
    classes = [*range(num_classes), *(-1 for _ in nodes)]
    return LabelTree.from_parents(np.array(parents), np.array(classes))


def is_flat(tree: LabelTree) -> bool:
    """Return whether all classes have the same ancestors.

    The ancestors then add the same number to every logit, so a softmax over the classes is the same
    as cross entropy on dense rows.
    """
    return len({tuple(tree.ancestors(node).tolist()) for node in tree.node_of_class}) == 1


def is_cross_entropy(arm: Arm, vectors: np.ndarray) -> bool:
    """Return whether the arm is equivalent to cross entropy because its label tree is flat.

    The label tree is checked, not the tree of the head's rows: hierarchical softmax stores inner
    nodes separately.
    """
    if arm.loss not in _WITH_TREE:
        return arm.loss == "ce"
    return is_flat(_named_tree(arm, vectors).tree)


def train_arms(settings: Mapping[str, Any], folders: Folders) -> Measures:
    """Train every arm at each of its rates on one draw (the job of `trained.Trained`).

    The measures include properties of the arm's tree.
    """
    regime = Regime(**settings["regime"])
    drawn = draw(regime, settings["draw"])
    arms = []
    for number, tree in enumerate(settings["arms"]):
        arm = Arm(tree["loss"], tree["base"])
        head = head_of(arm, drawn, folders.work / f"{number}.safetensors")
        arms.append(
            {
                "nodes": head.tree.num_nodes,
                "depth": float(head.tree.depth[head.tree.node_of_class].mean()),
                "is_cross_entropy": is_cross_entropy(arm, drawn.label_vectors),
                "runs": {f"{rate:g}": train_head(head, drawn, rate) for rate in tree["rates"]},
            }
        )
    return {"bayes": drawn.bayes_accuracy(), "arms": arms}


def head_of(arm: Arm, drawn: Drawn, file: Path) -> "ClassHead":
    """Build the arm's head.

    Its tree uses Euclidean distances between label vectors. It is written to `file`, because a head
    that builds its own tree would use cosine distances.
    """
    from heads import build_head
    from heads.config import HeadConfig

    weights: dict[str, Any] = {"kind": "dense"}
    if arm.loss in _WITH_TREE:
        _named_tree(arm, drawn.label_vectors).save(file)
        weights = {"kind": "utree" if arm.loss == "utree" else "vtree", "tree": {"file": str(file)}}
    loss = "ce" if arm.loss in TREES else arm.loss
    config = HeadConfig.model_validate(
        {"weights": weights, "loss": {"kind": loss}, "bias": False, "init_std": 0.0}
    )
    num_classes, dim = drawn.true.shape
    return build_head(
        config,
        dim=dim,
        num_classes=num_classes,
        label_vectors=drawn.label_vectors,
        mesh=None,
        seed=0,
        device="cpu",
    )


def _named_tree(arm: Arm, vectors: np.ndarray) -> NamedTree:
    cover = build_cover_tree(vectors, base=arm.base, metric="euclidean")
    names = [str(i) for i in range(len(vectors))]
    if arm.loss == "vtree_chains":
        tree = chained_vtree(cover)
        return NamedTree(tree, tuple(names), ("",) * (tree.num_nodes - tree.num_classes))
    return NamedTree.of_cover_tree(cover, names, "utree" if arm.loss == "utree" else "vtree")


def train_head(head: "ClassHead", drawn: Drawn, rate: float) -> Measures:
    """Train for one pass from zero.

    Measures the test accuracy and the Frobenius norm of the final and of the averaged weights.
    """
    import torch

    features, labels = torch.from_numpy(drawn.features), torch.from_numpy(drawn.labels)
    weight = head.weight
    with torch.no_grad():
        weight.zero_()
    total = torch.zeros_like(weight)
    for row in range(len(labels)):
        total += weight.detach()
        weight.grad = None
        head(features[row : row + 1], labels[row : row + 1]).backward()
        with torch.no_grad():
            assert weight.grad is not None
            weight.sub_(weight.grad, alpha=rate)
    measures = {"last": _accuracy(head, drawn), "last_norm": float(weight.detach().norm())}
    with torch.no_grad():
        weight.copy_(total / len(labels))
    return {
        **measures,
        "averaged": _accuracy(head, drawn),
        "averaged_norm": float(weight.detach().norm()),
    }


def _accuracy(head: "ClassHead", drawn: Drawn) -> float:
    import torch

    features, labels = torch.from_numpy(drawn.test_features), torch.from_numpy(drawn.test_labels)
    with torch.no_grad():
        blocks = list(head.score_blocks(features))
    scores = torch.cat([block.scores for block in blocks], dim=1)
    class_ids = torch.cat([block.class_ids for block in blocks])
    return float((class_ids[scores.argmax(1)] == labels).float().mean())
