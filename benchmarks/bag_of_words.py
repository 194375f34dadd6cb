"""Accuracy of bag-of-words models on text shards, as baselines for encoders.

    python -m benchmarks.bag_of_words shards/tweets --run runs/twitter-mbert-small

The baselines are logistic regression and a linear SVM on word unigrams and bigrams. With --run,
that run's model is evaluated on the same texts. The regularization strength of the baselines is
selected by accuracy on a held-out 10% of the training texts. Each model is evaluated once on the
test split.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, top_k_accuracy_score
from sklearn.model_selection import train_test_split
from sklearn.svm import LinearSVC

from benchmarks.timing import CONSOLE
from data.loading.loader import EvalLoader
from data.shards.split import open_split
from trainer.run.trained_run import open_trained
from trainer.world import open_world

MODELS: dict[str, tuple[Callable[..., LogisticRegression | LinearSVC], tuple[float, ...]]] = {
    "logistic regression": (LogisticRegression, (0.3, 1, 3, 10)),
    "linear SVM": (LinearSVC, (0.03, 0.1, 0.3, 1)),
}


def main() -> None:
    """Read the shards, fit the models and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bag_of_words", description=__doc__)
    parser.add_argument("shards", type=Path, help="folder of text shards")
    parser.add_argument("--train-split", default="train", help="split to fit the baselines on")
    parser.add_argument("--eval-split", default="test", help="split to evaluate on")
    parser.add_argument("--run", type=Path, help="run of an encoder trained on the shards")
    options = parser.parse_args()
    texts, labels = read_texts(options.shards, options.train_split)
    test_texts, test_labels = read_texts(options.shards, options.eval_split)
    # A strong baseline for such texts: drop rare words and dampen frequent ones.
    counter = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    counts, test_counts = counter.fit_transform(texts), counter.transform(test_texts)
    table = Table("model", "top-1", "top-5", "macro F1", title=f"{counts.shape[1]:,} words, pairs")
    for row in rows(counts, labels, test_counts, test_labels):
        table.add_row(*row)
    if options.run is not None:
        scores = encoder_scores(options.run, options.shards, options.eval_split)
        table.add_row(str(options.run), *measures(scores, test_labels))
    CONSOLE.print(table)


def read_texts(shards: Path, name: str) -> tuple[list[str], np.ndarray]:
    """Return the texts of a split and their labels, int64 [n]."""
    with open_split(shards, name) as split:
        return [split.text(index)[0] for index in range(len(split))], split.labels


def rows(
    counts: csr_matrix, labels: np.ndarray, test_counts: csr_matrix, test_labels: np.ndarray
) -> Iterator[tuple[str, ...]]:
    """Yield a row of the table for each model."""
    for name, (model, strengths) in MODELS.items():
        strength = best_strength(model, strengths, counts, labels)
        fitted = fit(model, strength, counts, labels)
        assert np.array_equal(fitted.classes_, np.arange(len(fitted.classes_)))
        scores = fitted.decision_function(test_counts)
        yield f"{name}, C = {strength}", *measures(scores, test_labels)


def measures(scores: np.ndarray, labels: np.ndarray) -> tuple[str, ...]:
    """Return top-1, top-5 and macro F1 of scores [n, K]."""
    found = scores.argmax(axis=1)
    numbers = (
        accuracy_score(labels, found),
        top_k_accuracy_score(labels, scores, k=5, labels=np.arange(scores.shape[1])),
        f1_score(labels, found, average="macro"),
    )
    return tuple(f"{number:.4f}" for number in numbers)


@torch.no_grad()
def encoder_scores(run: Path, shards: Path, name: str) -> np.ndarray:
    """Return the scores [n, K] of a run's newest checkpoint for the texts of a split, in order."""
    with open_world("cpu") as world:
        trained = open_trained(run, world)
    task, num_classes = trained.task, len(trained.manifest.classes)
    with open_split(shards, name) as split:
        scores = np.empty((len(split), num_classes), np.float32)
        for batch in EvalLoader(split, trained.recipe.data, batch=512):
            features = task.features(batch.inputs)
            for block in task.head.score_blocks(features):
                scores[np.ix_(batch.indices.numpy(), block.class_ids.numpy())] = block.scores
    return scores


def best_strength(
    model: Callable[..., LogisticRegression | LinearSVC],
    strengths: tuple[float, ...],
    counts: csr_matrix,
    labels: np.ndarray,
) -> float:
    """Return the C with the highest accuracy on a held-out 10% of the texts."""
    training, held_out = train_test_split(
        np.arange(len(labels)), test_size=0.1, random_state=0, stratify=labels
    )

    def accuracy(strength: float) -> float:
        fitted = fit(model, strength, counts[training], labels[training])
        return float(fitted.score(counts[held_out], labels[held_out]))

    return max(strengths, key=accuracy)


def fit(
    model: Callable[..., LogisticRegression | LinearSVC],
    strength: float,
    counts: csr_matrix,
    labels: np.ndarray,
) -> LogisticRegression | LinearSVC:
    return model(C=strength, max_iter=1000, random_state=0).fit(counts, labels)


if __name__ == "__main__":
    main()
