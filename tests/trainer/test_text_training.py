"""Training on texts, from shards to an evaluated run, and the rejection of incompatible
configurations.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.ranks import rank_world
from tests.shards import TINY_BERT, text_recipe
from trainer.evaluation import load_evaluation
from trainer.run.trained_run import open_trained
from trainer.train import train


def test_bert_learns_which_words_identify_the_class(texts: Path, tmp_path: Path) -> None:
    recipe = text_recipe(texts, tmp_path / "run", train__duration={"epochs": 12})
    train(recipe, rank_world())
    (step,) = {int(path.stem[5:]) for path in (recipe.run / "evaluations").glob("*.json")}
    assert load_evaluation(recipe.run / "evaluations", step=step).metrics["top1"] > 0.8


def test_a_run_with_a_changed_tokenizer_is_rejected(texts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    shutil.copytree(texts / "tokenizer", folder)
    recipe = text_recipe(texts, tmp_path / "run", data__text__tokenizer=str(folder))
    train(recipe, rank_world())
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for use in (partial(train, recipe), partial(open_trained, recipe.run)):
        with pytest.raises(ValueError, match="was trained with a different tokenizer"):
            use(rank_world())


def of_type(model_type: str, **changes: object) -> dict:
    """Return the configuration TINY_BERT with a different model type."""
    required = {"pad_token_id": 0, "vocab_size": 120, "max_position_embeddings": 64}
    return {**TINY_BERT, "model_type": model_type, **required, **changes}


GPT2 = {"model_type": "gpt2", "vocab_size": 120, "n_embd": 32, "n_layer": 1, "n_head": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone__config__vocab_size": 50}, r"the backbone has embeddings for 50"),
        ({"backbone__config__max_position_embeddings": 16}, r"max_length is 24, .* has 16"),
        (
            {"backbone__config": of_type("camembert", max_position_embeddings=24)},
            r"max_length is 24, .* has 23",
        ),
        (
            {"backbone__config__pad_token_id": 1},
            r"pads with token 0, but the backbone pads with 1: set b",
        ),
        ({"backbone__config": of_type("convbert", embedding_size=16)}, "convbert ignores the att"),
        (
            {"backbone__config": GPT2, "backbone__pooling": "auto"},
            r"gpt2 either is causal .*use backbone\.pooling=mean",
        ),
        (
            {"backbone__config": {"model_type": "resnet"}},
            "contains texts, but the backbone processes ima",
        ),
    ],
)
def test_an_incompatible_text_backbone_is_rejected(
    texts: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(text_recipe(texts, tmp_path / "run", **changes), rank_world())
