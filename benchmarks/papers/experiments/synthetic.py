"""Paper 000's synthetic data (6.1.1), and heads trained on it as the paper's theory has it.

The features are given, so there is neither backbone nor trainer: the real heads of
`heads.build_head`, without bias and from zero, take one step of SGD a sample, in one pass. Both
the last weights and the average of those before each step (Shalev-Shwartz and Ben-David 2014,
chapter 14) are tested. The paper says nothing of rates or passes.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.papers.budget import Budget
from benchmarks.papers.intervals import Mean, difference, mean
from benchmarks.papers.job import Job, Measures, Places, Results
from heads.tree import CoverTree, LabelTree, NamedTree, build_cover_tree

if TYPE_CHECKING:
    from heads import ClassHead

# Around the theory's ||W|| / (||x|| sqrt n), which is 0.2 for the paper's baseline; a path of many
# nodes moves a row a few times as far, so that a step of the grid must not be more than that.
RATES: Sequence[float] = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SHARED: Sequence[float] = (0.01, 0.1)
BASE = 1.3

PUBLISHED_DRAWS = 50
_LEAST_DRAWS = 3

TREES = ("vtree", "utree", "vtree_chains")
LOSSES = ("vtree", "utree", "ce", "simloss", "hierarchical_softmax")

NAMES = {
    "vtree": "V-tree",
    "utree": "U-tree",
    "ce": "cross entropy",
    "simloss": "SimLoss",
    "hierarchical_softmax": "hierarchical softmax",
    "vtree_chains": "V-tree with chains",
}


@dataclass(frozen=True)
class Regime:
    """n training samples of k classes in d dimensions, x ~ N(w_y, sigma); `tests` to test.

    The label vectors are (1 - epsilon) W + epsilon W', W' another draw (paper 000, eq 21).
    """

    n: int = 100
    d: int = 64
    k: int = 10
    sigma: float = 1.0
    tests: int = 10_000
    epsilon: float = 0.0


@dataclass(frozen=True)
class Arm:
    """A head: one of `LOSSES`, or `vtree_chains`; `base` is its cover tree's."""

    loss: str
    base: float = BASE


@dataclass(frozen=True)
class Drawn:
    """One W [k, d], what is known of it, and samples of it."""

    true: np.ndarray
    label_vectors: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray

    def bayes_accuracy(self) -> float:
        """Of the nearest row of W, than which nothing is better."""
        offset = np.square(self.true).sum(1) / 2
        chosen = (self.test_features @ self.true.T - offset).argmax(1)
        return float((chosen == self.test_labels).mean())


def draw(regime: Regime, number: int) -> Drawn:
    """Draw `number` of W and samples; the same W whatever n, sigma, tests or epsilon are."""
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
    """The V-tree of the explicit cover tree: a pseudoclass for each class at each level, also where
    it has one child alone, which `CoverTree.vtree` leaves out."""
    num_classes, num_levels = len(cover.level), int(cover.level.max()) + 1
    places = [(c, level) for c in range(num_classes) for level in range(cover.level[c], num_levels)]
    node = {place: num_classes + number for number, place in enumerate(places)}
    parents = [node[c, num_levels - 1] for c in range(num_classes)]
    for c, level in places:
        above = c if level > cover.level[c] else int(cover.center_parent[c])
        parents.append(-1 if above < 0 else node[above, level - 1])
    classes = [*range(num_classes), *(-1 for _ in places)]
    return LabelTree.from_parents(np.array(parents), np.array(classes))


def train_heads(settings: Mapping[str, Any], places: Places) -> Measures:
    """The job of `Trained`: every arm at each of its rates on one draw."""
    regime = Regime(**settings["regime"])
    drawn = draw(regime, settings["draw"])
    arms = []
    for number, tree in enumerate(settings["arms"]):
        arm = Arm(tree["loss"], tree["base"])
        head = head_of(arm, drawn, places.work / f"{number}.safetensors")
        arms.append(
            {
                "nodes": head.tree.num_nodes,
                "depth": float(head.tree.depth[head.tree.node_of_class].mean()),
                "runs": {f"{rate:g}": train_head(head, drawn, rate) for rate in tree["rates"]},
            }
        )
    return {"bayes": drawn.bayes_accuracy(), "arms": arms}


def head_of(arm: Arm, drawn: Drawn, file: Path) -> "ClassHead":
    """The arm's head; its tree, of Euclidean distances between label vectors, is written to
    `file`, since a recipe's own compares cosines."""
    from heads import build_head
    from heads.config import HeadConfig

    weights: dict[str, Any] = {"kind": "dense"}
    if arm.loss in (*TREES, "hierarchical_softmax"):
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
    """One pass from zero: test accuracy and Frobenius norm of the last and the averaged weights."""
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


@dataclass
class Trained:
    """What `arms` reach in a regime, draw by draw: each at the best of `rates`, which are searched
    on draws of their own, at those that all share, and at those of `also`."""

    regime: Regime
    arms: Sequence[Arm]
    rates: Sequence[float] = RATES
    searched: list[Measures] = field(default_factory=list)
    draws: list[Measures] = field(default_factory=list)
    also: Mapping[Arm, float] = field(default_factory=dict)

    def search(self, number: int) -> Job:
        """Trains all of it at all rates on draw `number`."""
        return self._job(number, dict.fromkeys(self.arms, self.rates))

    def job(self, number: int) -> Job:
        """Trains all of it on draw `number` at the rates that were chosen."""
        chosen = {}
        for arm in self.arms:
            own = {self.own_rate(arm, measure) for measure in ("averaged", "last")}
            also = {self.also[arm]} if arm in self.also else set()
            chosen[arm] = sorted({*own, *SHARED, *also})
        return self._job(number, chosen)

    def _job(self, number: int, rates: Mapping[Arm, Sequence[float]]) -> Job:
        settings = {
            "regime": asdict(self.regime),
            "arms": [{**asdict(arm), "rates": list(rates[arm])} for arm in self.arms],
            "draw": number,
        }
        return Job("experiments.synthetic:train_heads", settings)

    def bayes(self) -> Mean:
        """Accuracy of the best classifier there is."""
        return mean([found["bayes"] for found in self.draws])

    def at(self, arm: Arm, rate: float, measure: str = "averaged") -> list[float]:
        """A measure of each draw at one rate."""
        return self._of(self.draws, arm, rate, measure)

    def searched_at(self, arm: Arm, rate: float, measure: str = "averaged") -> list[float]:
        """The same of the draws of the search."""
        return self._of(self.searched, arm, rate, measure)

    def _of(self, draws: Sequence[Measures], arm: Arm, rate: float, measure: str) -> list[float]:
        place = self.arms.index(arm)
        return [float(found["arms"][place]["runs"][f"{rate:g}"][measure]) for found in draws]

    def at_own(self, arm: Arm, measure: str = "averaged") -> list[float]:
        """An accuracy of each draw, at the arm's own rate."""
        return self.at(arm, self.own_rate(arm, measure), measure)

    def own_rate(self, arm: Arm, measure: str = "averaged") -> float:
        """The rate that is the best over the draws of the search."""
        return max(self.rates, key=lambda rate: sum(self.searched_at(arm, rate, measure)))

    def advantage(self, ours: Arm, theirs: Arm, read: "Reading") -> Mean:
        """By how much ours is better, paired by draw."""
        return difference(read(self, ours), read(self, theirs))

    def pseudoclasses(self, arm: Arm) -> list[int]:
        """Of the arm's tree in each draw."""
        place = self.arms.index(arm)
        return [int(found["arms"][place]["nodes"]) - self.regime.k for found in self.draws]

    def depth(self, arm: Arm) -> Mean:
        """Mean number of nodes above a class."""
        place = self.arms.index(arm)
        return mean([float(found["arms"][place]["depth"]) for found in self.draws])


# Accuracies of an arm, draw by draw.
Reading = Callable[[Trained, Arm], list[float]]


def own(measure: str = "averaged") -> Reading:
    """Each arm at its own best rate."""
    return lambda trained, arm: trained.at_own(arm, measure)


def shared(rate: float, measure: str = "averaged") -> Reading:
    """All at one rate."""
    return lambda trained, arm: trained.at(arm, rate, measure)


def readings() -> dict[str, Reading]:
    """The ways to compare, by the words for them."""
    return {
        "own best rates, averaged": own(),
        "own best rates, last weights": own("last"),
        **{f"all at {rate:g}, averaged": shared(rate) for rate in SHARED},
        **{f"all at {rate:g}, last weights": shared(rate, "last") for rate in SHARED},
    }


def pooled(regimes: Sequence[Trained], ours: Arm, theirs: Arm, read: Reading) -> Mean:
    """The mean advantage over regimes, paired by draw."""
    apart = [np.subtract(read(one, ours), read(one, theirs)) for one in regimes]
    return mean(np.mean(apart, axis=0).tolist())


def search(
    budget: Budget, everyone: Sequence[Trained], *, draws: int
) -> Generator[Sequence[Job], Results, None]:
    """Searches the rates of all on the first `draws`."""
    numbers = range(1 if budget.is_toy else draws)
    results = yield [one.search(number) for one in everyone for number in numbers]
    for one in everyone:
        one.searched += [results[one.search(number)].measures for number in numbers]


def measure(
    budget: Budget, everyone: Sequence[Trained], *, together: int = 1
) -> Generator[Sequence[Job], Results, None]:
    """Measures all on the draws that follow, so many together, while the budget lasts."""
    first, rounds = len(everyone[0].searched), PUBLISHED_DRAWS // together
    at_least = rounds if budget.is_full else -(-_LEAST_DRAWS // together)
    for number in budget.rounds(at_least=at_least, at_most=rounds):
        numbers = range(first + number * together, first + (number + 1) * together)
        results = yield [one.job(draw) for one in everyone for draw in numbers]
        for one in everyone:
            one.draws += [results[one.job(draw)].measures for draw in numbers]


def setup(regimes: Sequence[Trained]) -> str:
    """How it was trained, in words for the page."""
    one = regimes[0]
    rates = ", ".join(f"{rate:g}" for rate in one.rates)
    own = [regime.own_rate(arm) for regime in regimes for arm in regime.arms]
    at_edge = sum(rate in (one.rates[0], one.rates[-1]) for rate in own)
    return (
        f"{len(one.draws)} draws of W, {one.regime.tests:,} test samples each. kway's heads "
        "without bias, from zero, one pass of single-sample SGD at a constant rate (the paper says "
        "nothing of rates and passes); weights averaged over the steps, and the last ones. Cover "
        "trees of the Euclidean distances between label vectors. Each loss has the best rate of "
        f"{rates} on {len(one.searched)} further draws, for averaged and for last weights apart; "
        f"in {at_edge} of {len(own)} cases that is the smallest or the largest."
    )
