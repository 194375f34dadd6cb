"""Texts from shards through training to an evaluated run, and what does not fit together."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.ranks import rank_world, run_on_ranks
from tests.shards import TINY_BERT, glyph_recipe, text_recipe
from trainer.config import Recipe
from trainer.evaluation import load_evaluation
from trainer.train import train
from trainer.trained import open_trained


def last_evaluation(recipe: Recipe) -> dict[str, float]:
    (step,) = {int(path.stem[5:]) for path in (recipe.run / "evaluations").glob("*.json")}
    return load_evaluation(recipe.run / "evaluations", step=step).metrics


def test_a_bert_learns_which_words_tell_the_class(texts: Path, tmp_path: Path) -> None:
    recipe = text_recipe(texts, tmp_path / "run", train__duration={"epochs": 12})
    train(recipe, rank_world())
    assert last_evaluation(recipe)["top1"] > 0.8


def train_on_a_rank(recipe: Recipe) -> None:
    train(recipe, rank_world())


def test_texts_train_on_three_ranks_as_on_one(texts: Path, tmp_path: Path) -> None:
    alone, three = (text_recipe(texts, tmp_path / name) for name in "ab")
    train(alone, rank_world())
    run_on_ranks(3, train_on_a_rank, three)
    assert last_evaluation(three) == pytest.approx(last_evaluation(alone), abs=1e-6)


def test_a_run_whose_tokenizer_became_another_is_refused(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(texts / "tokenizer", folder)
    recipe = text_recipe(texts, tmp_path / "run", data__text__tokenizer=str(folder))
    train(recipe, rank_world())
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for use in (partial(train, recipe), partial(open_trained, recipe.run)):
        with pytest.raises(ValueError, match="was trained with another tokenizer"):
            use(rank_world())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone__config__vocab_size": 50}, r"tokens and the backbone embeddings for 50"),
        ({"backbone__config__max_position_embeddings": 16}, r"max_length is 24 .* has 16"),
        ({"backbone__config": {"model_type": "resnet"}}, "holds texts and the backbone reads pict"),
    ],
)
def test_a_backbone_that_cannot_read_the_texts_is_refused(
    texts: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(text_recipe(texts, tmp_path / "run", **changes), rank_world())


def test_a_backbone_of_texts_is_refused_for_pictures(glyphs: Path, tmp_path: Path) -> None:
    recipe = glyph_recipe(glyphs, tmp_path / "run", backbone__config=TINY_BERT)
    with pytest.raises(ValueError, match="holds pictures and the backbone reads texts"):
        train(recipe, rank_world())
