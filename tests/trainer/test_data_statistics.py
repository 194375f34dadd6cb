"""Initial weights from the training data: class rows that are mean features, and the document
frequencies of a bag of words."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.shards.mixture import load_manifest
from data.shards.split import open_split
from data.shards.writing.writer import write_shards
from data.sources.table import Table
from data.text.tokenizer import open_tokenizer
from tests.ranks import rank_world, run_on_ranks
from tests.shards import glyph_recipe, text_recipe
from trainer.backbone.bag_of_words import BagOfWords
from trainer.config import Recipe
from trainer.run.data_statistics import start_from_data
from trainer.run.training_data import RunData
from trainer.task import Task
from trainer.train import train

BAG = {
    "kind": "trainer.backbone.bag_of_words:BagOfWords",
    "vocab_size": 120,
    "dim": 8,
    "ngrams": 2,
    "buckets": 50,
    "idf": True,
}


@pytest.fixture(scope="module")
def sets(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of the same texts, whose labels are the colors in the first four words."""
    folder = tmp_path_factory.mktemp("sets")
    with open_split(texts / "shards", "train") as split:
        found = [split.read(i)[0].decode() for i in range(len(split))]
    colors = ("red", "green", "blue", "white")
    rows = [(text, [color for color in colors if color in text.split()[:4]]) for text in found]
    lines = [f'"{text}",{"|".join(labels)},train' for text, labels in rows]
    table = folder / "table.csv"
    table.write_text("\n".join(["text,label,split", *lines, "red,red,test"]) + "\n")
    source = Table(
        (table,),
        folder / "work",
        text="text",
        label="label",
        label_separator="|",
        split="split",
        workers=0,
    )
    write_shards(source, folder / "shards", samples_per_shard=30, workers=0)
    source.clean_up()
    return folder / "shards"


def bag_recipe(texts: Path, run: Path, **changes: Any) -> Recipe:
    return text_recipe(texts, run, backbone=BAG, head__init="means", **changes)


def begun(recipe: Recipe, class_ranks: int | None = None) -> tuple[Task, RunData]:
    """Return a new task with the statistics of the training data."""
    data = RunData.open(recipe, load_manifest(recipe.data))
    world = rank_world(class_ranks)
    task = data.build_task(recipe, world)
    start_from_data(task, data, world)
    return task, data


def rows_on_a_rank(recipe: Recipe, class_ranks: int) -> tuple[int, torch.Tensor, int | None]:
    task, _ = begun(recipe, class_ranks)
    return task.head.engine.weights.start, task.head.weight.detach(), task.num_initial_rows


def check_means(recipe: Recipe) -> None:
    """Compare the rows with means over the samples in the order of the split."""
    task, data = begun(recipe)
    tokenizer = data.tokenizer
    assert tokenizer is not None
    sums = torch.zeros_like(task.head.weight)
    counts = torch.zeros(len(sums), 1)
    task.eval()
    for i in range(data.num_samples):
        text, _, labels = data.training.read(i)  # type: ignore[union-attr]
        ids = torch.tensor(tokenizer.encode([text.decode()]))
        (features,) = task.features({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        for label in np.atleast_1d(labels).tolist():
            sums[label] += features
            counts[label] += 1
    assert counts.all()
    torch.testing.assert_close(task.head.weight.detach(), sums / counts)
    assert task.num_initial_rows == len(counts)


def test_rows_are_the_mean_features_of_the_samples_of_each_class(texts, sets, tmp_path):
    check_means(bag_recipe(texts, tmp_path / "run"))
    check_means(bag_recipe(texts, tmp_path / "sets", data__shards=str(sets)))


@pytest.mark.parametrize(("world_size", "class_ranks"), [(3, 3), (4, 2)])
def test_every_mesh_computes_the_same_means(texts, sets, tmp_path, world_size, class_ranks):
    for shards in (texts / "shards", sets):
        recipe = bag_recipe(texts, tmp_path / "run", data__shards=str(shards))
        task, _ = begun(recipe)
        ranks = run_on_ranks(world_size, rows_on_a_rank, recipe, class_ranks)
        for start, rows, num in ranks:
            expected = task.head.weight.detach()[start : start + len(rows)]
            torch.testing.assert_close(rows, expected)
            assert num == task.num_initial_rows


def test_means_are_those_of_images_without_mixup(glyphs, tmp_path):
    plain, mixed = (
        begun(glyph_recipe(glyphs, tmp_path / "run", head__init="means", data__augment=augment))[0]
        for augment in ({"flip": 0}, {"flip": 0, "mix": {"mixup_alpha": 1}})
    )
    torch.testing.assert_close(plain.head.weight, mixed.head.weight)


def test_weights_are_the_document_frequencies_of_the_training_texts(texts, tmp_path):
    task, data = begun(bag_recipe(texts, tmp_path / "run"))
    tokenizer = open_tokenizer(str(texts / "tokenizer"), max_length=24)
    counts = np.zeros(120)
    for i in range(data.num_samples):
        text = data.training.read(i)[0].decode()  # type: ignore[union-attr]
        counts[list({*tokenizer.encode([text])[0]})] += 1
    expected = np.where(counts > 0, 1 + np.log((1 + data.num_samples) / (1 + counts)), 0)
    encoder = task.backbone.encoder
    assert isinstance(encoder, BagOfWords)
    found = encoder.weights.weight.detach().squeeze(1).numpy()
    np.testing.assert_allclose(found[:120], expected, rtol=1e-6)
    assert (found[120:] > 0).any()  # n-grams
    ids = torch.tensor([[7, 7, 3, 0, 0], [3, 7, 9, 4, 7]])
    n = encoder.document_counts(ids, torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
    assert n[[0, 3, 4, 7, 9]].tolist() == [0, 2, 1, 2, 1]


def test_a_resumed_run_keeps_its_rows(texts, tmp_path, capsys):
    whole, parts = (bag_recipe(texts, tmp_path / name) for name in ("whole", "parts"))
    train(whole, rank_world())
    assert "rows of 4 classes from means" in capsys.readouterr().out
    (newest,) = (whole.run / "checkpoints").glob("step-*")
    newest.rename(tmp_path / newest.name)
    folder = parts.run / "checkpoints"
    folder.mkdir(parents=True)
    (tmp_path / newest.name).rename(folder / newest.name)
    longer = bag_recipe(texts, parts.run, train__duration={"steps": 6})
    train(longer, rank_world())
    assert "rows of" not in capsys.readouterr().out
    for each in folder.glob("step-*"):  # a run whose checkpoints are all damaged starts again
        (each / "manifest.json").write_text("{}")
    train(longer, rank_world())
    assert "rows of 4 classes from means" in capsys.readouterr().out
