"""Training that starts from the backbone and the class weights of a bundle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serving.model import Model
from tests.ranks import rank_world, run_on_ranks
from tests.tiny_bundle import write
from tests.trainer.tiny_classifiers import save_image_classifier
from trainer.bundle.bundle import Bundle
from trainer.bundle.export import export_run
from trainer.config import Recipe
from trainer.importing.classifier import import_classifier
from trainer.recipe import build_recipe
from trainer.task import build_task
from trainer.train import train

# The classes of the shards are some of those of the bundle, in another order, and a new one.
CLASS_NAMES = ("tabby cat", "new class", "husky", "siamese cat")
FEW = ("husky", "beagle", "tiger")  # the bundle has only the first one
GRAY = {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]}
PIXELS = torch.randint(256, (3, 1, 16, 16), dtype=torch.uint8, generator=torch.manual_seed(0))


def recipe_from(bundle: Path, run: Path = Path("unused"), **changes: Any) -> Recipe:
    tree = {
        "run": str(run),
        "data": {"shards": "unused", "image": GRAY},
        "backbone": {"init": str(bundle)},
        "head": {"init": str(bundle)},
        "train": {"duration": {"steps": 2}, "global_batch": 12},
    }
    return build_recipe(tree | changes, origin="test")


def logits_by_name(recipe: Recipe, class_names: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the initial logits [B] of this rank's classes."""
    task = build_task(
        recipe, class_names=class_names, label_vectors=None, world=rank_world()
    ).eval()
    features = task.features({"pixel_values": PIXELS})
    return {
        class_names[class_id]: scores
        for block in task.head.score_blocks(features)
        for class_id, scores in zip(block.class_ids.tolist(), block.scores.T, strict=True)
    }


def bundle_logits(path: Path) -> dict[str, Tensor]:
    with Bundle.open(path) as bundle, torch.no_grad():
        features = bundle.load_backbone()({"pixel_values": PIXELS})
        logits = bundle.logits(features, range(bundle.spec.num_classes))
        return dict(zip((entry.name for entry in bundle.classes), logits.T, strict=True))


def check_initial_logits(path: Path) -> set[str]:
    found, expected = logits_by_name(recipe_from(path), CLASS_NAMES), bundle_logits(path)
    for name in found.keys() & expected.keys():
        torch.testing.assert_close(found[name].detach(), expected[name])
    return set(found)


@pytest.mark.parametrize("bias", [True, False])
def test_logits_before_the_first_step_equal_those_of_the_bundle(bias, tmp_path):
    assert check_initial_logits(write(tmp_path / "bundle", bias=bias)) == set(CLASS_NAMES)


def initial_logits_and_rejection(path: Path) -> set[str]:
    with pytest.raises(ValueError, match="1 of the 3 classes of the shards"):
        logits_by_name(recipe_from(path), FEW)
    return check_initial_logits(path)


def test_the_ranks_of_a_class_group_load_their_own_rows_or_reject_the_bundle_together(tmp_path):
    path = write(tmp_path / "bundle")
    ranks = run_on_ranks(3, initial_logits_and_rejection, path)
    assert set().union(*ranks) == set(CLASS_NAMES)


def test_an_imported_image_model_is_trained_further_and_exported(images, tmp_path, capsys):
    names = {number: f"class {number}" for number in range(5)}
    save_image_classifier(tmp_path / "model", "swin", id2label=names)
    import_classifier(str(tmp_path / "model"), tmp_path / "imported")
    bundle = Bundle.open(tmp_path / "imported")
    image = bundle.spec.image.model_dump(mode="json")
    data = {"shards": str(images), "image": image, "augment": {"crop_area": None, "flip": 0}}
    optimizer = {"kind": "sgd", "lr": 1e-12}
    recipe = recipe_from(tmp_path / "imported", tmp_path / "run", data=data, optimizer=optimizer)
    train(recipe, rank_world())
    assert "rows of 5 classes from" in capsys.readouterr().out
    export_run(tmp_path / "run", tmp_path / "exported", rank_world())
    exported = Model.open(tmp_path / "exported")
    assert exported.bundle.spec.recalls
    file = next((images.parent / "images").rglob("*.png")).read_bytes()
    original = Model.open(tmp_path / "imported")
    logits = [
        model.bundle.logits(model.features([model.prepare(file)]), range(5))
        for model in (exported, original)
    ]
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": {"shards": "unused", "image": {**GRAY, "std": [0.5]}}}, "set data.image.std"),
        ({"head": {"init": "BUNDLE", "bias": False}}, "set head.bias=true"),
        ({"head": {"init": "BUNDLE", "logits": {"kind": "cosine"}, "bias": False}}, "head"),
        ({"head": {"init": "BUNDLE", "logits": {"scale": 2.0}}}, "set head.logits"),
        ({"head": {"init": "missing"}}, "missing is not a bundle"),
        ({"backbone": {"init": "missing"}}, "missing is not a bundle"),
    ],
)
def test_a_bundle_that_does_not_match_the_recipe_is_rejected(changes, reason, tmp_path):
    path = write(tmp_path / "bundle")
    changes = {
        key: {name: str(path) if value == "BUNDLE" else value for name, value in options.items()}
        for key, options in changes.items()
    }
    with pytest.raises((ValueError, OSError), match=reason):
        logits_by_name(recipe_from(path, **changes), CLASS_NAMES)


def test_few_classes_of_a_bundle_are_loaded_if_the_recipe_allows_it(tmp_path):
    path = write(tmp_path / "bundle")
    head = {"init": str(path), "min_init_share": 0.3}
    found = logits_by_name(recipe_from(path, head=head), FEW)
    torch.testing.assert_close(found["husky"].detach(), bundle_logits(path)["husky"])
