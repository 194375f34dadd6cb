"""Libraries of extreme classification on a table with several labels per row: `python -m
benchmarks.extreme debian.jsonl -o results.json [--peers omikuji,napkinxc] [--seeds 3]`.

The table has the columns text, labels and split, as `examples/xmc/` writes it. All libraries get
the same TF-IDF features (scikit-learn, words, sublinear) and run with their default options, each
in a process of its own, in which the time of its training, the CPU time of all threads and the peak
memory are measured. Training includes the file that omikuji reads.

The measures are P@k and propensity-scored P@k (Jain, Prabhu and Varma 2016) with the constants
A = 0.55 and B = 1.5, as a fraction of the highest possible value. A label that the training rows do
not contain does not count. `--table results.json` prints the results as a table in Markdown.

The libraries are not dependencies of kway: `pip install omikuji==0.5.2 napkinxc==0.7.2
libpecos scikit-learn`.
"""

import argparse
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import scipy.sparse as sp

K = 5
_A, _B = 0.55, 1.5
MEASURES = [f"{name}@{k}" for name in ("P", "PSP") for k in (1, 3, 5)]

# A library's training: (features [N, F], labels [N, K], seed, empty folder) -> its predictor, which
# maps features [M, F] to the K best labels of each row.
Predictor = Callable[[sp.csr_matrix], list[list[int]]]


# ------------------------------------------------------------------- libraries


def omikuji(X: sp.csr_matrix, Y: sp.csr_matrix, seed: int, folder: Path) -> Predictor:
    """Three trees of Parabel. The library reads its training data from a file and has no seed."""
    import omikuji

    path = folder / "train.txt"
    with path.open("w") as file:
        file.write(f"{X.shape[0]} {X.shape[1]} {Y.shape[1]}\n")
        for features, labels in zip(_pairs(X), _pairs(Y), strict=True):
            named = ",".join(str(label) for label, _ in labels)
            file.write(f"{named} {' '.join(f'{one}:{value:.6g}' for one, value in features)}\n")
    model = omikuji.Model.train_on_data(str(path))

    def predict(Z: sp.csr_matrix) -> list[list[int]]:
        return [[label for label, _ in model.predict(row, top_k=K)] for row in _pairs(Z)]

    return predict


def napkinxc(X: sp.csr_matrix, Y: sp.csr_matrix, seed: int, folder: Path) -> Predictor:
    """A probabilistic label tree."""
    from napkinxc.models import PLT

    model = PLT(str(folder / "model"), seed=seed)
    model.fit(X, [[label for label, _ in row] for row in _pairs(Y)])
    return lambda Z: model.predict(Z, top_k=K)


def pecos(X: sp.csr_matrix, Y: sp.csr_matrix, seed: int, folder: Path) -> Predictor:
    """XR-Linear over a tree of PIFA label vectors."""
    from pecos.xmc import Indexer, LabelEmbeddingFactory
    from pecos.xmc.xlinear.model import XLinearModel

    vectors = LabelEmbeddingFactory.create(Y, X, method="pifa")
    model = XLinearModel.train(X, Y, C=Indexer.gen(vectors, seed=seed))

    def predict(Z: sp.csr_matrix) -> list[list[int]]:
        found = model.predict(Z, only_topk=K)
        return [
            [label for label, _ in sorted(row, key=lambda pair: -pair[1])] for row in _pairs(found)
        ]

    return predict


LIBRARIES: dict[str, tuple[Callable[..., Predictor], str]] = {
    "omikuji": (omikuji, "omikuji==0.5.2"),
    "napkinxc": (napkinxc, "napkinxc==0.7.2"),
    "pecos": (pecos, "libpecos"),
}


def _pairs(matrix: sp.csr_matrix) -> list[list[tuple[int, float]]]:
    """Return the column and the value of each nonzero of each row."""
    indices, data = matrix.indices.tolist(), matrix.data.tolist()
    at = matrix.indptr.tolist()
    return [list(zip(indices[a:b], data[a:b], strict=True)) for a, b in pairwise(at)]


# -------------------------------------------------------------------- measures


def inverse_propensities(Y: sp.csr_matrix) -> np.ndarray:
    """Return 1 / p for each label, float64 [K] (Jain, Prabhu and Varma 2016, section 4)."""
    rows = Y.shape[0]
    count = np.bincount(Y.indices, minlength=Y.shape[1])
    return 1 + (np.log(rows) - 1) * (_B + 1) ** _A * np.exp(-_A * np.log(count + _B))


def measures(top: list[list[int]], true: sp.csr_matrix, inverse: np.ndarray) -> dict[str, float]:
    """Return P@k and PSP@k, in percent, of the best labels `top` of each row."""
    totals = defaultdict[str, float](float)
    for guesses, labels in zip(top, _pairs(true), strict=True):
        given = {label for label, _ in labels}
        best = sorted((inverse[label] for label in given), reverse=True)
        for k in (1, 3, 5):
            hits = [inverse[label] for label in guesses[:k] if label in given]
            totals[f"P@{k}"] += len(hits) / k
            totals[f"PSP@{k}"] += sum(hits)
            totals[f"possible@{k}"] += sum(best[:k])
    found = {f"P@{k}": 100 * totals[f"P@{k}"] / len(top) for k in (1, 3, 5)}
    return found | {
        f"PSP@{k}": 100 * totals[f"PSP@{k}"] / totals[f"possible@{k}"] for k in (1, 3, 5)
    }


# ------------------------------------------------------------------------ runs


def prepare(table: Path, folder: Path) -> dict[str, int]:
    """Write the features and the labels of both splits to `folder`, and return their sizes."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    splits: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    with table.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            splits[row["split"]].append(row)
    names = sorted({label for row in splits["train"] for label in row["labels"]})
    numbers = {name: number for number, name in enumerate(names)}
    vectorizer = TfidfVectorizer(sublinear_tf=True, dtype=np.float32)
    vectorizer.fit(row["text"] for row in splits["train"])
    for split, rows in splits.items():
        features = vectorizer.transform(row["text"] for row in rows)
        features.sort_indices()
        sp.save_npz(folder / f"{split}-features.npz", features)
        labels = [
            sorted(numbers[label] for label in row["labels"] if label in numbers) for row in rows
        ]
        at = np.cumsum([0, *map(len, labels)])
        ones = np.ones(at[-1], np.float32)
        flat = np.array([one for row in labels for one in row], np.int32)
        matrix = sp.csr_matrix((ones, flat, at), shape=(len(rows), len(names)))
        sp.save_npz(folder / f"{split}-labels.npz", matrix)
    return {
        "rows": len(splits["train"]),
        "test_rows": len(splits["test"]),
        "labels": len(names),
        "features": features.shape[1],
    }


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train a library in this process, and return its measures, times and peak memory."""
    X, Y, Z, true = (
        sp.load_npz(folder / f"{split}-{what}.npz")
        for split in ("train", "test")
        for what in ("features", "labels")
    )
    with tempfile.TemporaryDirectory() as work:
        started, used = time.perf_counter(), time.process_time()
        predict = LIBRARIES[name][0](X, Y, seed, Path(work))
        times = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - used,
        }
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        found = measures(predict(Z), true, inverse_propensities(Y))
    return {"library": name, "seed": seed, **found, **times, "peak_mb": peak}


def table(results: dict[str, Any]) -> str:
    """Return the results as a table in Markdown: the mean over the seeds ± 1.96 standard errors."""
    columns = {**dict.fromkeys(MEASURES, 1), "seconds": 0, "cpu_seconds": 0, "peak_mb": 0}
    heading = ["library", *MEASURES, "training, s", "CPU, s", "peak memory, MB"]
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    runs = defaultdict[str, list[dict[str, Any]]](list)
    for one in results["runs"]:
        runs[one["library"]].append(one)
    for name, found in runs.items():
        cells = []
        for column, digits in columns.items():
            values = [one[column] for one in found]
            error = 1.96 * stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
            cells.append(f"{mean(values):.{digits}f}" + f" ± {error:.{digits}f}" * bool(error))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path, help="JSON lines with several labels per row")
    parser.add_argument("-o", "--out", type=Path, help="JSON file to which the runs are added")
    parser.add_argument("--peers", default=",".join(LIBRARIES), help="the libraries to run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", type=Path, help="print the table of a JSON file, and exit")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)  # library, seed, folder
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    if options.worker:
        name, seed, folder = options.worker
        found = run(name, int(seed), Path(folder))
        (Path(folder) / "result.json").write_text(json.dumps(found))
        return
    if options.data is None or options.out is None:
        parser.error("pass the table and --out")
    if unknown := set(options.peers.split(",")) - LIBRARIES.keys():
        parser.error(f"--peers: unknown library {unknown.pop()}: use {', '.join(LIBRARIES)}")
    names = []
    for name in options.peers.split(","):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is missing: pip install {LIBRARIES[name][1]}", file=sys.stderr)
        else:
            names.append(name)
    with tempfile.TemporaryDirectory() as work:
        sizes = prepare(options.data, Path(work))
        results = {"data": options.data.name, **sizes, "cpus": os.cpu_count()}
        results |= {"machine": platform.machine(), "runs": []}
        for seed in range(options.seeds):  # the libraries take turns
            for name in names:
                command = [sys.executable, "-m", __spec__.name, "--worker", name, str(seed), work]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found = json.loads((Path(work) / "result.json").read_text())
                results["runs"].append(found)
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
