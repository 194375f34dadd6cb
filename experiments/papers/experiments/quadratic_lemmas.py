"""Paper 001, Lemmas 3.2, 3.4 and 3.5: closed forms and simulation on the K-class mixture.

The losses are kway's; they are evaluated with a head whose rows are the classifier Theta.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from experiments.papers.budget import Budget
from experiments.papers.experiment import Experiment, PlotFolder, Procedure
from experiments.papers.intervals import Mean, difference, mean
from experiments.papers.job import Folders, Job, Measures
from experiments.papers.section import Claim, Section, Table, verdict, verdict_within

if TYPE_CHECKING:
    from heads.losses import Loss

_WEIGHTS = (0.0, 1.0, 10.0, 100.0, 1_000.0, 10_000.0)
_EPSILONS = (1.0, 0.1, 0.01)
_CLOSE = 0.005  # relative tolerance of a simulation


@dataclass(frozen=True)
class Mixture:
    """K classes with unit centers M [K, d] in random directions and noise covariance sigma^2 I."""

    k: int
    d: int
    sigma: float

    def centers(self, number: int) -> np.ndarray:
        rows = np.random.default_rng([number, self.k, self.d]).normal(size=(self.k, self.d))
        return _unit(rows)

    def text(self) -> str:
        return f"{self.k}, {self.d}, {self.sigma:g}"


def minimizer(centers: np.ndarray, ridge: float) -> np.ndarray:
    """Return M (M'M + ridge I)^-1 [K, d].

    It minimizes the quadratic loss if ridge is K sigma^2 (Lemma 3.4 prints sigma^2).
    """
    gram = centers.T @ centers + ridge * np.eye(centers.shape[1])
    return np.linalg.solve(gram, centers.T).T


def least_quadratic(centers: np.ndarray, sigma: float) -> float:
    """Return the minimum of the quadratic loss, 1/2 sum_k sigma^2 / (K sigma^2 + lambda_k(MM')).

    Lemma 3.4 prints it without the factor 1/2.
    """
    eigenvalues = np.linalg.eigvalsh(centers @ centers.T).clip(0)
    return float((sigma**2 / (len(centers) * sigma**2 + eigenvalues)).sum() / 2)


def ccql_minimizer(centers: np.ndarray, sigma: float, w: float) -> tuple[np.ndarray, float]:
    """Return the minimizer Theta [K, d] of the correct-class quadratic loss, and its minimum.

    Each row i is a separate least-squares problem with the matrix (M'M + w mu_i mu_i') / K
    + sigma^2 (1 + w / K) I and the right-hand side (1 + w) mu_i / K.
    """
    k, d = centers.shape
    plain = centers.T @ centers / k + sigma**2 * (1 + w / k) * np.eye(d)
    rows = np.stack(
        [
            np.linalg.solve(plain + w / k * np.outer(center, center), (1 + w) / k * center)
            for center in centers
        ]
    )
    return rows, float((1 + w - (1 + w) / k * np.sum(rows * centers)) / 2)


def ccql_bound(centers: np.ndarray, sigma: float) -> float:
    """Return ||MM' - I||^2 / K + K sigma^2 (Lemma 3.5), which does not depend on w."""
    k = len(centers)
    return float(np.square(centers @ centers.T - np.eye(k)).sum() / k + k * sigma**2)


def simulated(loss: "Loss", theta: np.ndarray, features: np.ndarray, labels: np.ndarray) -> float:
    """Return the value of one of kway's losses at the logits Theta x."""
    import torch

    from heads import ClassHead

    num_classes, dim = theta.shape
    head = ClassHead(dim, num_classes, loss, bias=False, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(theta))
        return float(head(torch.from_numpy(features), torch.from_numpy(labels)))


def measure_quadratic(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Compute losses in closed form and simulate them with normal noise (Lemmas 3.4 and 3.5)."""
    from heads.losses import CorrectClassQuadratic, Quadratic

    mixture, number = Mixture(**settings["mixture"]), settings["draw"]
    centers, sigma = mixture.centers(number), mixture.sigma
    rng = np.random.default_rng([number, mixture.k, mixture.d, 1])
    labels = rng.integers(mixture.k, size=settings["samples"])
    features = centers[labels] + sigma * rng.normal(size=(len(labels), mixture.d))

    def quadratic(theta: np.ndarray) -> float:
        return simulated(Quadratic(), theta, features, labels)

    found: Measures = {
        "closed": least_quadratic(centers, sigma),
        "simulated": quadratic(minimizer(centers, mixture.k * sigma**2)),
        "as printed": quadratic(minimizer(centers, sigma**2)),
        "bound": ccql_bound(centers, sigma),
        "by w": [],
    }
    for w in (math.sqrt(mixture.k - 1) - 1, *_WEIGHTS):
        theta, least = ccql_minimizer(centers, sigma, w)
        loss = CorrectClassQuadratic(w=w)
        found["by w"].append(
            {
                "w": w,
                "closed": least,
                "simulated": simulated(loss, theta, features, labels),
                "at M": simulated(loss, centers, features, labels),
            }
        )
    return found


def measure_cross_entropy(settings: Mapping[str, Any], _folders: Folders) -> Measures:
    """Compute CE at Theta = R M with noise of norm at most gamma (Lemma 3.2; a job).

    The noise is uniform in the ball, or points directly at the nearest other center.
    """
    from heads.losses import CrossEntropy

    k, d, number = settings["k"], settings["d"], settings["draw"]
    centers = Mixture(k, d, 0.0).centers(number)
    cosines = centers @ centers.T - 2 * np.eye(k)  # exclude a center's cosine with itself
    gamma = (1 - np.abs(centers @ centers.T - np.eye(k)).max()) / 3
    rng = np.random.default_rng([number, k, d, 2])
    labels = rng.integers(k, size=settings["samples"])
    directions = rng.normal(size=(len(labels), d))
    toward = centers[cosines.argmax(1)] - centers
    noise = {
        "uniform": _unit(directions) * rng.uniform(size=(len(labels), 1)) ** (1 / d),
        "worst": _unit(toward)[labels],
    }
    losses = {}
    for name, of_length_one in noise.items():
        features = centers[labels] + gamma * of_length_one
        losses[name] = [
            simulated(CrossEntropy(), math.log(k / epsilon) / gamma * centers, features, labels)
            for epsilon in _EPSILONS
        ]
    return {"gamma": float(gamma), **losses}


def _unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def _procedure(budget: Budget, plots: PlotFolder) -> Procedure:
    samples = 500 if budget.is_toy else budget.size(20_000, least=2_000)
    mixtures = [
        Mixture(k, d, sigma)
        for k, d in ((10, 32), (25, 32), (100, 32))[: 1 if budget.is_toy else 3]
        for sigma in (0.1, 0.5)
    ]
    shapes = [(10, 64), (100, 64)][: 1 if budget.is_toy else 2]
    quadratic: list[list[Measures]] = []
    entropy: list[list[Measures]] = []
    for number in budget.rounds(at_least=5, at_most=50):
        draw = budget.first_seed + number
        quadratic_jobs = [
            Job(
                "experiments.quadratic_lemmas:measure_quadratic",
                {"mixture": asdict(mixture), "draw": draw, "samples": samples},
            )
            for mixture in mixtures
        ]
        entropy_jobs = [
            Job(
                "experiments.quadratic_lemmas:measure_cross_entropy",
                {"k": k, "d": d, "draw": draw, "samples": samples},
            )
            for k, d in shapes
        ]
        results = yield [*quadratic_jobs, *entropy_jobs]
        quadratic.append([results[job].measures for job in quadratic_jobs])
        entropy.append([results[job].measures for job in entropy_jobs])
    found = _Found(mixtures, shapes, quadratic, entropy)
    return _section(found, samples, plots)


@dataclass(frozen=True)
class _Found:
    """Measures by draw, then by mixture (Lemmas 3.4 and 3.5) or shape (Lemma 3.2)."""

    mixtures: Sequence[Mixture]
    shapes: Sequence[tuple[int, int]]
    quadratic: list[list[Measures]]
    entropy: list[list[Measures]]

    def of(self, index: int, take: Callable[[Measures], float]) -> list[float]:
        """Return a measure of one mixture for each draw."""
        return [take(of_draw[index]) for of_draw in self.quadratic]

    def over(self, take: Callable[[Measures], float]) -> Mean:
        """Return the mean of a measure over mixtures, with its confidence interval over draws."""
        return mean([mean([take(one) for one in of_draw]).value for of_draw in self.quadratic])


def _section(found: _Found, samples: int, plots: PlotFolder) -> Section:
    plot = plots.save(
        EXPERIMENT.name,
        _figure(found),
        title="Lemma 3.5: minimum of the correct-class quadratic loss by w (points: simulated). "
        "Dashed: the bound, which does not depend on w.",
        alt_text="For each mixture, a line that rises with w and crosses a horizontal dashed line.",
    )
    return Section(
        setup=f"Unit centers in random directions are drawn {len(found.quadratic)} times, with "
        f"{samples:,} samples per draw. Losses are computed with kway's ce, quadratic and ccql. "
        "The noise for Lemmas 3.4 and 3.5 is normal; the noise for Lemma 3.2 has a norm of at "
        "most gamma.",
        claims=[
            *_entropy_claims(found),
            *_quadratic_claims(found),
            *_ccql_claims(found),
        ],
        tables=[_entropy_table(found), _quadratic_table(found), _ccql_table(found)],
        plots=[plot],
        remarks=[
            "Corrected derivation of Lemma 3.4: K times the loss has the gradient Theta (M'M + "
            "K sigma^2 I) - M. The minimizer therefore contains K sigma^2, where the lemma prints "
            "sigma^2 (its proof does contain the factor K). The identity matrix has size d, not "
            "size K as printed in the lemma. The minimum keeps the factor 1/2 of the loss, which "
            "the lemma omits.",
            "The proof of Lemma 3.5 accounts for the noise in the quadratic term but not in the "
            "term weighted by w. At Theta = M, the noise in that term adds w sigma^2 / 2 to the "
            "loss. Some such increase is unavoidable: for any Theta, the loss is at least w / 2 "
            "times sigma^2 / (1 + sigma^2).",
        ],
    )


def _entropy_claims(found: _Found) -> list[Claim]:
    """Return the claim of Lemma 3.2, judged by the smallest relative margin below epsilon."""
    margin = min(
        1 - loss / epsilon
        for of_draw in found.entropy
        for one in of_draw
        for noise in ("uniform", "worst")
        for loss, epsilon in zip(one[noise], _EPSILONS, strict=True)
    )
    return [
        Claim(
            "Lemma 3.2: with R = log(K / epsilon) / gamma, CE is at most epsilon",
            "holds" if margin >= 0 else "does not hold",
            f"smallest margin: {margin:.3f} epsilon ({len(found.entropy)} draws)",
        )
    ]


def _quadratic_claims(found: _Found) -> list[Claim]:
    gap = found.over(lambda one: one["simulated"] / one["closed"] - 1)
    printed = found.over(lambda one: one["as printed"] / one["simulated"] - 1)
    half = found.over(lambda one: one["simulated"] / (2 * one["closed"]))
    return [
        Claim(
            "Lemma 3.4, corrected: QL is minimized by M (M'M + K sigma^2 I)^-1, with the value "
            "1/2 sum sigma^2 / (K sigma^2 + lambda)",
            verdict_within(gap, _CLOSE),
            f"simulation / closed form - 1: {gap.text(5)} ({gap.n} draws)",
        ),
        Claim(
            "Lemma 3.4 as printed: QL is minimized by M (M'M + sigma^2 I)^-1",
            verdict(Mean(-printed.value, printed.half, printed.n)),
            f"relative excess over the minimum: {printed.text()} (paired, {printed.n} draws)",
        ),
        Claim(
            "Lemma 3.4 as printed: the minimum of QL is sum sigma^2 / (K sigma^2 + lambda)",
            verdict_within(Mean(half.value - 1, half.half, half.n), _CLOSE),
            f"simulation / printed formula: {half.text(4)}",
        ),
    ]


def _ccql_claims(found: _Found) -> list[Claim]:
    gap = found.over(
        lambda one: mean([at["simulated"] / at["closed"] - 1 for at in one["by w"]]).value
    )
    within = found.over(lambda one: 1 - one["by w"][0]["simulated"] / one["bound"])
    beyond = found.over(lambda one: 1 - one["by w"][-1]["simulated"] / one["bound"])
    return [
        Claim(
            "the closed form of the minimum of CCQL, row by row, matches the simulation",
            verdict_within(gap, _CLOSE),
            f"simulation / closed form - 1: {gap.text(5)} ({gap.n} draws)",
        ),
        Claim(
            "Lemma 3.5: the minimum of CCQL is at most ||MM' - I||^2 / K + K sigma^2 "
            "(w = sqrt(K - 1) - 1)",
            verdict(within),
            f"1 - loss / bound: {within.text()} ({within.n} draws)",
        ),
        Claim(
            f"Lemma 3.5: the bound holds for large w ({_WEIGHTS[-1]:,.0f})",
            verdict(beyond),
            f"1 - loss / bound: {beyond.text()} ({beyond.n} draws)",
        ),
    ]


def _entropy_table(found: _Found) -> Table:
    rows = []
    for index, (k, d) in enumerate(found.shapes):
        ones = [of_draw[index] for of_draw in found.entropy]
        gamma = mean([one["gamma"] for one in ones]).text()
        for which, epsilon in enumerate(_EPSILONS):
            losses = [mean([one[noise][which] for one in ones]) for noise in ("uniform", "worst")]
            rows.append([f"{k}, {d}", gamma, f"{epsilon:g}", *(one.text(5) for one in losses)])
    header = ["K, d", "gamma", "epsilon", "CE, uniform noise", "CE, noise to the nearest center"]
    return Table("Lemma 3.2: cross entropy at R M", header, rows)


def _quadratic_table(found: _Found) -> Table:
    rows = [
        [
            mixture.text(),
            mean(found.of(index, lambda one: one["closed"])).text(5),
            mean(found.of(index, lambda one: one["simulated"])).text(5),
            difference(
                found.of(index, lambda one: one["simulated"]),
                found.of(index, lambda one: one["closed"]),
            ).text(5),
            mean(found.of(index, lambda one: one["as printed"])).text(5),
            f"{max(0.0, 1 - mixture.d / mixture.k) / 2:.3f}",
        ]
        for index, mixture in enumerate(found.mixtures)
    ]
    header = ["K, d, sigma", "closed form", "simulated", "difference"]
    header += ["at the printed minimizer", "(1 - d / K) / 2"]
    return Table("Lemma 3.4: minimum of the quadratic loss", header, rows)


def _ccql_table(found: _Found) -> Table:
    rows = []
    for index, mixture in enumerate(found.mixtures):
        bounds = found.of(index, lambda one: one["bound"])
        for which in range(1 + len(_WEIGHTS)):
            ones = [of_draw[index]["by w"][which] for of_draw in found.quadratic]
            least, real, at_m = (
                [at[name] for at in ones] for name in ("closed", "simulated", "at M")
            )
            broken = sum(loss > bound for loss, bound in zip(least, bounds, strict=True))
            w = f"{ones[0]['w']:g}" if which else f"{ones[0]['w']:.2f} (default)"
            shown = (mean(values).text(4) for values in (least, real, at_m, bounds))
            rows.append([mixture.text(), w, *shown, f"{broken} of {len(ones)}"])
    header = ["K, d, sigma", "w", "closed form", "simulated", "at M", "bound", "bound violated in"]
    return Table("Lemma 3.5: minimum of the correct-class quadratic loss", header, rows)


def _figure(found: _Found) -> Figure:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, mixture in enumerate(found.mixtures):
        weights = np.array([at["w"] for at in found.quadratic[0][index]["by w"][2:]])
        least, real = (
            [
                mean([of_draw[index]["by w"][which][name] for of_draw in found.quadratic])
                for which in range(2, 1 + len(_WEIGHTS))
            ]
            for name in ("closed", "simulated")
        )
        (line,) = axes.plot(weights, [one.value for one in least])
        color = line.get_color()
        axes.errorbar(
            weights,
            [one.value for one in real],
            yerr=[one.half for one in real],
            fmt="osD^vx"[index],
            color=color,
            capsize=3,
            label=f"K = {mixture.k}, sigma = {mixture.sigma:g}",
        )
        bound = mean(found.of(index, lambda one: one["bound"])).value
        axes.plot(weights[[0, -1]], [bound, bound], "--", color=color, linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("w, weight of the correct class")
    axes.set_ylabel("minimum of CCQL")
    axes.legend(fontsize=9)
    return figure


EXPERIMENT = Experiment(
    name="001-lemmas",
    paper="001",
    title="Lemmas 3.2, 3.4 and 3.5 on the mixture model",
    minutes=0.5,
    procedure=_procedure,
)
