"""Shards of published datasets, modified as the experiments require."""

from pathlib import Path
from shutil import rmtree

import numpy as np
import pytest

from data.images.decode import decode
from data.shards.label_vectors import load_label_vectors
from data.shards.manifest import Manifest
from data.shards.split import open_split
from experiments.papers.job import Folders
from experiments.papers.job_runner import JobRunner
from experiments.papers.shards import COARSE, Dataset, shards_of


def made(dataset: Dataset, data: Path, out: Path) -> Path:
    with JobRunner(data, out, workers=0) as runner:
        runner.measure([dataset.job])
    return shards_of(dataset, Folders(data, out / "shards", out))


def labels(shards: Path, split: str) -> list[int]:
    with open_split(shards, split) as opened:
        return [int(label) for label in opened.labels]


def test_a_validation_split_is_held_out(papers_data: Path, tmp_path: Path) -> None:
    dataset = Dataset("cifar100", validation=5, limits={"test": 4}, side=8)
    shards = made(dataset, papers_data, tmp_path)
    sizes = {split: labels(shards, split) for split in ("train", "validation", "test")}
    assert [len(found) for found in sizes.values()] == [1195, 5, 4]
    assert sorted(sizes["train"] + sizes["validation"]) == sorted([*range(100)] * 12)
    with open_split(shards, "test") as opened:
        assert decode(opened.read(0)[0], 3).shape == (8, 8, 3)


def test_label_noise_is_confined_to_the_coarse_class_and_the_training_split(
    papers_data: Path, tmp_path: Path
) -> None:
    shards = [
        made(Dataset("cifar100", noise=noise), papers_data, tmp_path) for noise in (0.0, 0.5, 1.0)
    ]
    clean, half, full = (np.array(labels(folder, "train")) for folder in shards)
    assert (clean // 5 == half // 5).all()
    assert (clean // 5 == full // 5).all()
    # One in five labels is replaced by itself.
    assert (clean != half).mean() == pytest.approx(0.4, abs=0.05)
    assert (clean != full).mean() == pytest.approx(0.8, abs=0.05)
    assert labels(shards[0], "test") == labels(shards[2], "test")


def test_coarse_classes_contribute_half_of_the_similarity(
    papers_data: Path, tmp_path: Path
) -> None:
    shards = made(Dataset("cifar100", vectors=COARSE), papers_data, tmp_path)
    vectors = load_label_vectors(shards, Manifest.load(shards))
    cosines = vectors @ vectors.T / 2
    assert cosines[0, [0, 1, 4, 5, 99]].tolist() == [1, 0.5, 0.5, 0, 0]


def test_missing_shards_are_written_again(papers_data: Path, tmp_path: Path) -> None:
    dataset = Dataset("cifar100", limits={"train": 100, "test": 5})
    shards = made(dataset, papers_data, tmp_path)
    before = labels(shards, "test")
    rmtree(shards)
    assert labels(made(dataset, papers_data, tmp_path), "test") == before
