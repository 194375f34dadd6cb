"""The bag of words: what its features depend on, and its path from a recipe to a query."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

from tests.ranks import rank_world
from tests.shards import text_recipe
from trainer.backbone.bag_of_words import BagOfWords
from trainer.evaluation import load_evaluation
from trainer.recipe import load_recipe
from trainer.train import train

NUM_TOKENS, DIM = 50, 8
KIND = "trainer.backbone.bag_of_words:BagOfWords"


def network(ngrams: int = 1) -> BagOfWords:
    torch.manual_seed(0)
    made = BagOfWords(NUM_TOKENS, DIM, ngrams=ngrams, buckets=1000)
    torch.nn.init.uniform_(made.weights.weight, 0.5, 2)
    return made


def features(bag: BagOfWords, *texts: list[int]) -> Tensor:
    """Return the features of token IDs, padded to the longest text."""
    longest = max(map(len, texts))
    ids = [text + [0] * (longest - len(text)) for text in texts]
    mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
    return bag(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))


def test_the_features_are_the_weighted_sum_over_the_norm_of_the_weights() -> None:
    bag = network()
    text = [7, 3, 3]
    weights, vectors = bag.weights.weight[text], bag.vectors.weight[text]
    expected = (weights * vectors).sum(0) / weights.norm()
    torch.testing.assert_close(features(bag, text), expected.unsqueeze(0))


@pytest.mark.parametrize("ngrams", [1, 2, 3])
def test_the_order_of_tokens_matters_only_with_ngrams(ngrams: int) -> None:
    one, other = features(network(ngrams), [7, 3, 9, 4], [4, 9, 3, 7])
    assert torch.allclose(one, other, atol=1e-6) == (ngrams == 1)


@pytest.mark.parametrize("ngrams", [1, 2, 3])
def test_padding_does_not_change_the_features(ngrams: int) -> None:
    bag = network(ngrams)
    padded = features(bag, [7, 3], [7, 3, 9, 4, 8])[:1]
    torch.testing.assert_close(padded, features(bag, [7, 3]))


def test_an_ngram_has_the_same_row_at_every_position() -> None:
    bag = network(2)
    with torch.no_grad():
        bag.vectors.weight[:NUM_TOKENS] = 0  # only n-grams
        bag.weights.weight.fill_(1)
    one, other = features(bag, [7, 3, 9], [9, 7, 3])
    pair = features(bag, [7, 3])[0] * 3**0.5
    rest = [features(bag, two)[0] * 3**0.5 for two in ([3, 9], [9, 7])]
    torch.testing.assert_close(one * 5**0.5, pair + rest[0])
    torch.testing.assert_close(other * 5**0.5, pair + rest[1])


def test_a_text_that_consists_of_padding_has_finite_features_and_gradients() -> None:
    bag = network(2)
    ids = torch.zeros(1, 4, dtype=torch.int64)
    bag(input_ids=ids, attention_mask=ids).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in bag.parameters() if p.grad is not None)


def test_the_name_replaces_another_backbone(texts: Path, tmp_path: Path) -> None:
    tree = json.loads(text_recipe(texts, tmp_path / "run").model_dump_json())
    path = tmp_path / "bert.yaml"
    path.write_text(yaml.safe_dump(tree))
    for overrides in (
        ["backbone.kind=bag_of_words", "backbone.vocab_size=120"],
        ["backbone={kind: bag_of_words, vocab_size: 120}"],
    ):
        recipe = load_recipe(path, overrides)
        assert recipe.backbone.kind == KIND
    (tmp_path / "bag.yaml").write_text(
        "base: bert.yaml\nbackbone: {kind: bag_of_words, vocab_size: 120, dim: 16}\n"
    )
    override = "backbone.kind=bag_of_words"  # the same kind: the options stay
    assert load_recipe(tmp_path / "bag.yaml", [override]).backbone.dim == 16  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"backbone\.dmi is not a known key: did you mean dim"):
        load_recipe(tmp_path / "bag.yaml", ["backbone.dmi=8"])


def test_a_bag_of_words_trains_and_answers_queries_without_permission_to_import(
    texts: Path, tmp_path: Path, kway: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads(text_recipe(texts, tmp_path / "run").model_dump_json())
    tree["backbone"] = {
        "kind": "bag_of_words",
        "vocab_size": 120,
        "dim": 16,
        "ngrams": 2,
        "buckets": 1000,
    }
    tree["optimizer"]["lr"] = 0.03
    tree["train"]["duration"] = {"epochs": 8}
    tree["checkpoint"]["every"] = {"epochs": 8}
    path, run, bundle = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "bundle"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=r"embeddings for 50: set backbone\.vocab_size to "):
        train(load_recipe(path, ["backbone.vocab_size=50"]), rank_world())
    assert kway("train", path) == 0, capsys.readouterr().err
    (evaluation,) = (run / "evaluations").glob("*.json")
    step = int(evaluation.stem.removeprefix("step-"))
    assert load_evaluation(run / "evaluations", step=step).metrics["top1"] > 0.8
    assert kway("export", run, "-o", bundle, "--onnx") == 0, capsys.readouterr().err
    capsys.readouterr()
    assert kway("query", bundle, "--text", "a text") == 0, capsys.readouterr().err
