"""A recipe that uses the hierarchy stored with the shards as its label tree."""

import pytest

from data.shards.hierarchy import class_paths
from data.shards.manifest import Manifest
from heads.tree import label_tree_of_paths
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from trainer.run.trained_run import open_trained
from trainer.train import train

HIERARCHY = {"head__weights": {"kind": "vtree", "tree": {"kind": "hierarchy"}}}


def test_a_run_trains_and_loads_with_the_hierarchy_of_its_shards(glyphs, tmp_path):
    recipe = glyph_recipe(glyphs, tmp_path / "run", **HIERARCHY, train__duration={"steps": 2})
    train(recipe, rank_world())
    opened = open_trained(tmp_path / "run", rank_world())
    manifest = Manifest.load(glyphs)
    expected, _ = label_tree_of_paths(*class_paths(glyphs, manifest))
    assert opened.step == 2
    assert opened.task.head.tree.digest() == expected.digest()
    assert expected.num_nodes > expected.num_classes


def test_shards_without_a_hierarchy_are_rejected(images, tmp_path):
    recipe = glyph_recipe(images, tmp_path / "run", **HIERARCHY)
    with pytest.raises(ValueError, match="source imagefolder does not provide a hierarchy"):
        train(recipe, rank_world())
