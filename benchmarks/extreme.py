"""kway and libraries of extreme classification on a table with several labels per row: `python -m
benchmarks.extreme debian.jsonl -o results.json [--peers kway,omikuji] [--seeds 3]`.

The table has the columns text, labels and split, as `examples/xmc/` writes it. The libraries get
the same TF-IDF features (scikit-learn, words, sublinear) and run with their default options. kway
gets the texts and a tokenizer of the same words; the recipe is `KWAY`, with several losses. Each
run has a process of its own, in which the time of its training, the CPU time of all threads and
processes and the peak memory are measured. Training includes the file that omikuji reads and the
shards of kway, but not the TF-IDF features and the list of words.

The measures are P@k and propensity-scored P@k (`heads/set_measures.py`), in percent. A label that
the training rows do not contain does not count. `--table results.json` prints the results as a
table in Markdown.

The other libraries are not dependencies of kway: `pip install omikuji==0.5.2 napkinxc==0.7.2
scikit-learn`. libpecos needs numpy 1 and scipy 1.13, so it has to be in another environment, which
also has torch and kway's other dependencies: `--python pecos=OTHER/bin/python`.
"""

import argparse
import importlib.util
import json
import os
import platform
import re
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

# kway and its libraries are imported in functions, so that they are not part of the memory of the
# other libraries' processes.

K = 5
MEASURES = [f"{name}@{k}" for name in ("P", "PSP") for k in (1, 3, 5)]

# A library's training: (features [N, F], labels [N, K], seed, empty folder) -> its predictor, which
# maps features [M, F] to the K best labels of each row.
Predictor = Callable[[sp.csr_matrix], list[list[int]]]


# The recipe of kway's runs; the options were chosen on held-out training sources.
KWAY: dict[str, Any] = {
    "backbone": {"kind": "bag_of_words", "dim": 256, "idf": True},
    "head": {"init": "means", "logits": {"scale": 10}},
    "optimizer": {"kind": "adamw", "lr": 5e-3, "weight_decay": 0, "head": {"lr": 3e-4}},
    "schedule": {"kind": "linear", "warmup": {"steps": 20}},
    "train": {"duration": {"epochs": 6}, "global_batch": 512},
    "evaluation": {"topk": [1, 3, 5]},
    "checkpoint": {"every": {"epochs": 6}},
}
LOSSES: dict[str, dict[str, Any]] = {
    "kway": {"kind": "decoupled_softmax", "sample_rate": 0.1},
    "kway-ce": {"kind": "ce", "sample_rate": 0.1},
    "kway-bce": {"kind": "bce"},
}


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
    "pecos": (pecos, "libpecos==1.2.8 into another environment: --python pecos=OTHER/bin/python"),
}


def _pairs(matrix: sp.csr_matrix) -> list[list[tuple[int, float]]]:
    """Return the column and the value of each nonzero of each row."""
    indices, data = matrix.indices.tolist(), matrix.data.tolist()
    at = matrix.indptr.tolist()
    return [list(zip(indices[a:b], data[a:b], strict=True)) for a, b in pairwise(at)]


# ------------------------------------------------------------------------ kway


def write_for_kway(
    splits: dict[str, list[dict[str, Any]]], words: dict[str, int], folder: Path
) -> None:
    """Write a table of the rows, a tokenizer whose tokens are the `words`, and a recipe. The split
    `probe` has one row, because `kway train` always evaluates the final model."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

    from data.text.tokenizer import Tokenizer as Tokens

    known = {label for row in splits["train"] for label in row["labels"]}
    with (folder / "table.jsonl").open("w", encoding="utf-8") as file:
        for split, rows in (splits | {"probe": splits["train"][:1]}).items():
            for row in rows:
                labels = [label for label in row["labels"] if label in known]
                line = {"text": row["text"], "labels": labels, "split": split}
                file.write(json.dumps(line) + "\n")
    vocabulary = {"[PAD]": 0, "[UNK]": 1} | {word: 2 + number for word, number in words.items()}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\b\w\w+\b"), "removed", invert=True)
    roles = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    Tokens.of(backend, roles, max_length=256, name="words").save(folder / "tokenizer")
    text = {"tokenizer": str(folder / "tokenizer"), "max_length": 256}
    recipe = KWAY | {"data": {"text": text, "eval_split": "probe"}}
    recipe["backbone"] = {**KWAY["backbone"], "vocab_size": len(vocabulary)}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # YAML contains JSON


def run_kway(loss: dict[str, Any], seed: int, folder: Path, work: Path) -> dict[str, float]:
    """Write shards of the table and train, and return the measures, times and peak memory."""
    started, shards, columns = time.perf_counter(), work / "shards", ["--text=text"]
    columns += ["--label=labels", "--label-sets", "--split=split"]
    _command("shard", "table", folder / "table.jsonl", *columns, "-o", shards)
    settings = [f"run={work / 'run'}", f"data.shards={shards}", f"seed={seed}"]
    _command("train", folder / "recipe.yaml", *settings, f"head.loss={json.dumps(loss)}")
    found = _cost(started, resource.RUSAGE_CHILDREN)
    _command("eval", work / "run", "--split", "test")
    (result,) = (work / "run" / "evaluations" / "test").glob("*.json")
    metrics = json.loads(result.read_text())
    for name in MEASURES:
        measure, k = name.split("@")
        found[name] = 100 * metrics[f"{'precision' if measure == 'P' else 'psp'}_at_{k}"]
    return found


def _command(*arguments: object) -> None:
    """Run a `kway` command."""
    command = [sys.executable, "-m", "launch", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


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
    write_for_kway(splits, vectorizer.vocabulary_, folder)
    return {
        "rows": len(splits["train"]),
        "test_rows": len(splits["test"]),
        "labels": len(names),
        "features": features.shape[1],
    }


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train a library in this process, or kway in processes of its own, and return the measures,
    times and peak memory."""
    with tempfile.TemporaryDirectory() as work:
        if name in LOSSES:
            found = run_kway(LOSSES[name], seed, folder, Path(work))
            return {"library": name, "seed": seed, **found}
        X, Y, Z, true = (
            sp.load_npz(folder / f"{split}-{what}.npz")
            for split in ("train", "test")
            for what in ("features", "labels")
        )
        started = time.perf_counter()
        used = resource.getrusage(resource.RUSAGE_SELF)
        predict = LIBRARIES[name][0](X, Y, seed, Path(work))
        found = _cost(started, resource.RUSAGE_SELF, used)
        top = predict(Z)
    counts = np.bincount(Y.indices, minlength=Y.shape[1])
    found |= measures(top, true, counts, Y.shape[0])
    return {"library": name, "seed": seed, **found}


def measures(
    top: list[list[int]], true: sp.csr_matrix, counts: np.ndarray, num_rows: int
) -> dict[str, float]:
    """Return P@k and PSP@k, in percent, of the best labels `top` of each row; a library may return
    fewer than K. `counts` [K] are the numbers of the `num_rows` training rows with each label."""
    import torch

    from heads import LabelSets
    from heads.set_measures import inverse_propensities, measures_at_k

    no_label = -1
    padded = [labels + [no_label] * (K - len(labels)) for labels in top]
    sets = LabelSets(torch.from_numpy(true.indices), torch.from_numpy(true.indptr))
    inverse = inverse_propensities(torch.from_numpy(counts), num_rows)
    at_k = measures_at_k(torch.tensor(padded), sets, inverse)
    of = {"P": at_k["precision"], "PSP": at_k["psp"]}
    return {f"{name}@{k}": 100 * float(of[name][k - 1]) for name in of for k in (1, 3, 5)}


def _cost(
    started: float, who: int, before: resource.struct_rusage | None = None
) -> dict[str, float]:
    """Return the time since `started`, and the CPU time and peak memory of this process (`who` is
    RUSAGE_SELF) since `before`, or those of its children."""
    used = resource.getrusage(who)
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss
    if before is not None:
        cpu -= before.ru_utime + before.ru_stime
        # ru_maxrss includes the memory of the parent process before exec.
        (line,) = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        peak = int(line)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_mb": peak / 1024}


def table(results: dict[str, Any]) -> str:
    """Return the results as a table in Markdown: the mean over the seeds and its 95% interval
    (Student's t)."""
    from scipy.stats import t

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
            n = len(values)
            error = t.ppf(0.975, n - 1) * stdev(values) / n**0.5 if n > 1 else 0.0
            cells.append(f"{mean(values):.{digits}f}" + f" ± {error:.{digits}f}" * bool(error))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path, help="JSON lines with several labels per row")
    parser.add_argument("-o", "--out", type=Path, help="JSON file to which the runs are added")
    parser.add_argument(
        "--peers", default=",".join([*LOSSES, *LIBRARIES]), help="the libraries to run"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--python", action="append", default=[], help="LIBRARY=PATH: another Python for a library"
    )
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
    if unknown := set(options.peers.split(",")) - LOSSES.keys() - LIBRARIES.keys():
        known = ", ".join([*LOSSES, *LIBRARIES])
        parser.error(f"--peers: unknown library {unknown.pop()}: use {known}")
    names, pythons = [], dict(each.split("=", 1) for each in options.python)
    for name in options.peers.split(","):
        if name in LIBRARIES.keys() - pythons.keys() and not importlib.util.find_spec(name):
            print(f"{name} is missing: pip install {LIBRARIES[name][1]}", file=sys.stderr)
        else:
            names.append(name)
    with tempfile.TemporaryDirectory() as work:
        sizes = prepare(options.data, Path(work))
        results = {"data": options.data.name, **sizes, "cpus": os.cpu_count()}
        results |= {"machine": platform.machine(), "runs": []}
        for seed in range(options.seeds):  # the libraries take turns
            for name in names:
                python = pythons.get(name, sys.executable)
                command = [python, "-m", __spec__.name, "--worker", name, str(seed), work]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                found = json.loads((Path(work) / "result.json").read_text())
                results["runs"].append(found)
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
