"""Sets of labels from a CSV file to a query, with the commands of a user."""

import csv
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import yaml

from data.shards.split import open_split
from heads import LabelSets
from heads.set_measures import inverse_propensities, measures_at_k
from serving.answer import top_classes
from serving.model import Model
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import final_tensors, launched, losses
from trainer.__main__ import main
from trainer.backbone import precision
from trainer.evaluation import load_evaluation

Kway = Callable[..., int]
TAGS = ["red", "green", "blue", "round", "flat", "old", "new", "tall"]


def drawn_sets(num: int) -> list[list[str]]:
    """Up to three tags per row. One row in eight has none."""
    rng = np.random.default_rng(4)
    shares = 1 / np.arange(2, len(TAGS) + 2)
    sizes = [0 if row % 8 == 3 else int(rng.integers(1, 4)) for row in range(num)]
    choose = {"replace": False, "p": shares / shares.sum()}
    return [rng.choice(TAGS, size, **choose).tolist() for size in sizes]


def write_table(path: Path, column: str, values: list[str], sets: list[list[str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([column, "tags", "split"])
        for number, (value, tags) in enumerate(zip(values, sets, strict=True)):
            writer.writerow([value, "|".join(tags), "test" if number % 4 == 0 else "train"])


def shard(kway: Kway, table: Path, column: str, out: Path) -> None:
    options = ["--label", "tags", "--label-separator", "|", "--split", "split", "--workers", 0]
    assert kway("shard", "table", table, f"--{column}", column, *options, "-o", out) == 0


@pytest.fixture
def texts(tmp_path: Path, kway: Kway) -> Path:
    """Shards of texts that contain the names of their tags, and a tokenizer."""
    rng, sets = np.random.default_rng(5), drawn_sets(160)
    words = [*["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"], "while"]
    values = []
    for tags in sets:
        text = [*tags, *tags, *rng.choice(words, 3).tolist()]
        values.append(" ".join(rng.permutation(text).tolist()))
    write_table(tmp_path / "texts.csv", "text", values, sets)
    shard(kway, tmp_path / "texts.csv", "text", tmp_path / "shards")
    assert kway("tokenizer", tmp_path / "shards", "-o", tmp_path / "tokenizer") == 0
    return tmp_path


def text_recipe(texts: Path, **changes: Any) -> Path:
    tree: dict[str, Any] = {
        "run": str(texts / "run"),
        "data": {
            "shards": str(texts / "shards"),
            "text": {"tokenizer": str(texts / "tokenizer"), "max_length": 24},
        },
        "backbone": {"kind": "bag_of_words", "vocab_size": 200, "dim": 16},
        "head": {"loss": {"kind": "decoupled_softmax"}},
        "optimizer": {"kind": "adamw", "lr": 0.03},
        "train": {"duration": {"epochs": 10}, "global_batch": 20},
        "evaluation": {"topk": [1, 3], "every": {"epochs": 5}, "propensity": [0.6, 2.6]},
        "checkpoint": {"every": {"epochs": 5}, "keep_best": {}},
    }
    path = texts / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree | changes), encoding="utf-8")
    return path


def evaluation(run: Path) -> Any:
    step = max(int(path.stem[5:]) for path in (run / "evaluations").glob("step-*.json"))
    return load_evaluation(run / "evaluations", step=step)


def test_texts_with_tags_are_trained_evaluated_exported_and_queried(
    texts: Path, kway: Kway, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, bundle, table = texts / "run", texts / "bundle", texts / "classes.csv"
    assert kway("train", text_recipe(texts)) == 0, capfd.readouterr().err
    trained = evaluation(run)
    assert trained.metrics["precision_at_1"] > 0.8
    assert kway("eval", run, "--classes", table) == 0
    shown = capfd.readouterr().out
    for name in ("precision at 1", "nDCG at 3", "(PSP) at 3", "macro F1 at thresholds for"):
        assert name in shown
    assert "top1" not in shown
    assert evaluation(run).metrics == pytest.approx(trained.metrics, abs=1e-6)
    with table.open(encoding="utf-8", newline="") as file:
        assert {row["name"] for row in csv.DictReader(file)} == set(TAGS)
    assert kway("export", run, "-o", bundle) == 0
    card = (bundle / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "| psp_at_1 | 0." in card
    assert "The auprc and precision_at_recall metrics" in card
    assert r"label_separator=\|, " in card  # in a table
    newest = json.loads(max((run / "checkpoints").glob("*/manifest.json")).read_text())
    assert newest["best"]["value"] == trained.metrics["precision_at_1"]

    # The metrics are those of the exported model on the texts of the split.
    with (
        open_split(texts / "shards", "test") as split,
        open_split(texts / "shards", "train") as one,
    ):
        read = [split.read(number) for number in range(len(split))]
        counts = torch.from_numpy(one.class_counts())
        weights = inverse_propensities(counts, len(one), a=0.6, b=2.6)
        names = split.classes.names
    raw, sets = [each[0].decode() for each in read], [each[2].tolist() for each in read]
    model = Model.open(bundle)
    features = model.features([model.prepare(text) for text in raw])
    predicted = top_classes(model.bundle, features, 3)[1]
    found = measures_at_k(predicted, LabelSets.of(sets), weights)
    for name, values in found.items():
        for k in (1, 3):
            assert trained.metrics[f"{name}_at_{k}"] == pytest.approx(
                float(values[k - 1]), abs=1e-9
            )

    capfd.readouterr()
    best = predicted[0, 0].item()
    assert kway("query", bundle, "--text", raw[0], "--recall", 0.9, "--json") == 0
    first = json.loads(capfd.readouterr().out)["results"][0]["classes"][0]
    assert first["class"] == names[best]
    assert first["threshold"] is not None
    assert first["match"] == (first["score"] >= first["threshold"])

    again = texts / "again"
    assert kway("calibrate", bundle, texts / "shards", "-o", again) == 0
    assert f"40 samples of {len(TAGS)} classes, precision at 1 " in capfd.readouterr().out
    before, after = (Model.open(path).bundle.thresholds for path in (bundle, again))
    assert before is not None
    assert after is not None
    np.testing.assert_array_equal(after.reached, before.reached)
    np.testing.assert_allclose(after.thresholds, before.thresholds, rtol=1e-4, atol=1e-5)

    # A processor without instructions for bf16 computes the same, only more slowly.
    monkeypatch.setattr(precision, "check_processor", lambda precision: None)
    low = texts / "low"
    quantize = "quantize", bundle, texts / "shards", "-o", low, "--precision", "bf16"
    assert kway(*quantize) == 0, capfd.readouterr().err
    assert "| precision at 1, bf16 | " in (low / "MODEL_CARD.md").read_text(encoding="utf-8")
    rounded = Model.open(low).bundle.thresholds
    assert rounded is not None
    np.testing.assert_allclose(rounded.thresholds, before.thresholds, atol=0.1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["head.loss.kind=max_margin"],
            "max_margin needs exactly one label per row: for label sets",
        ),
        (
            ["head.weights.kind=factored", "head.loss.kind=ccql", "optimizer={kind: sgd, lr: 0.1}"],
            "ccql needs exactly one label per row",
        ),
        (
            ["head.loss.kind=bce", "head.class_weights=balanced"],
            "bce does not support class weights with label sets",
        ),
        (["checkpoint.keep_best.measure=top3"], "this run computes only precision_at_1, "),
    ],
    ids=["loss", "factored", "class weights", "measure"],
)
def test_what_sets_do_not_support_is_one_line(
    overrides: list[str], message: str, texts: Path, capfd: Any
) -> None:
    assert main([str(text_recipe(texts)), *overrides]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error


def test_confusions_of_sets_are_refused(texts: Path, kway: Kway, capfd: Any) -> None:
    assert main([str(text_recipe(texts)), "train.duration={steps: 2}"]) == 0
    capfd.readouterr()
    assert kway("eval", texts / "run", "--confusions", 3) == 2
    assert "--confusions needs one label per sample" in capfd.readouterr().err
    assert kway("report", texts / "run", "-o", texts / "report.html") == 0
    assert "Precision at 1" in (texts / "report.html").read_text(encoding="utf-8")


def test_a_split_without_labels_is_an_error_before_training(
    texts: Path, kway: Kway, capfd: Any
) -> None:
    sets = [[] if row % 4 == 0 else ["red", "blue"][: 1 + row % 2] for row in range(24)]
    write_table(texts / "half.csv", "text", [f"text {row}" for row in range(24)], sets)
    shard(kway, texts / "half.csv", "text", texts / "half")
    half = f"data.shards={texts / 'half'}"
    assert main([str(text_recipe(texts)), half, f"run={texts / 'none'}"]) == 2
    message = "no sample of split 'test' has a label: choose from the splits train, "
    assert message in capfd.readouterr().err.splitlines()[-1]
    swapped = ["data.train_split=test", "data.eval_split=train", f"run={texts / 'none'}"]
    assert main([str(text_recipe(texts)), half, *swapped]) == 2
    unlabeled = "no sample of the training split 'test' has a label"
    assert unlabeled in capfd.readouterr().err.splitlines()[-1]
    assert not (texts / "none" / "recipe.yaml").exists()
    assert main([str(text_recipe(texts)), "train.duration={steps: 1}"]) == 0
    assert kway("export", texts / "run", "-o", texts / "bundle") == 0
    capfd.readouterr()
    assert kway("calibrate", texts / "bundle", texts / "half", "-o", texts / "again") == 2
    assert message in capfd.readouterr().err.splitlines()[-1]
    assert not (texts / "again").exists()


@pytest.fixture
def images(tmp_path: Path, kway: Kway) -> Path:
    """Shards of images with a bar for each of their tags."""
    rng, sets = np.random.default_rng(6), drawn_sets(48)
    for number, tags in enumerate(sets):
        image = rng.integers(0, 60, (16, 16), dtype=np.uint8)
        for tag in tags:
            image[:, 2 * TAGS.index(tag)] += 150
        assert cv2.imwrite(str(tmp_path / f"{number}.png"), image)
    write_table(tmp_path / "images.csv", "image", [f"{i}.png" for i in range(48)], sets)
    shard(kway, tmp_path / "images.csv", "image", tmp_path / "shards")
    return tmp_path / "shards"


@pytest.mark.slow
def test_a_killed_run_has_the_weights_of_an_undisturbed_run_bit_by_bit(
    images: Path, tmp_path: Path
) -> None:
    """Two ranks with mixed images and sampled classes."""
    recipe = glyph_recipe(
        images,
        tmp_path / "unused",
        head__loss__kind="ce",
        backbone__batch_norm="frozen",
        data__augment={"crop_area": [0.7, 1.0], "flip": 0, "mix": {"mixup_alpha": 0.4}},
        data__sampling={"power": 0.5},
        data__workers=1,
        train__duration={"steps": 9},
        train__micro_batches=2,
        checkpoint={"every": {"steps": 2}},
        telemetry={"log_every": 1},
    )
    path = write_recipe(tmp_path, recipe)
    with launched(path, tmp_path / "killed", "--max-restarts", "3") as training:
        training.wait_for_step(4)
        os.kill(training.ranks[1], signal.SIGKILL)
        assert training.end() == 0, training.output
    message = "rank 1 was killed by SIGKILL (out of memory?); restart 1 of 3"
    assert message in training.output
    assert "Traceback" not in training.output
    with launched(path, tmp_path / "undisturbed") as training:
        assert training.end() == 0, training.output
    assert losses(tmp_path / "killed") == losses(tmp_path / "undisturbed")
    expected = final_tensors(tmp_path / "undisturbed")
    found = final_tensors(tmp_path / "killed")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
