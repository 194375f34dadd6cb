"""An imported text classifier returns the logits of the original model, from text to score."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from serving.model import Model
from tests.serving.started import ask
from tests.trainer.tiny_classifiers import (
    MAX_LENGTH,
    TEXT_MODELS,
    UNSUPPORTED_TEXT_MODELS,
    bundle_logits,
    save_text_classifier,
)
from trainer.importing.classifier import import_classifier

TEXTS = ["husky", "a cat and a dog or a tabby cat", "und 猫 🐶", "", "cat " * 50]


@torch.inference_mode()
def original_logits(model, folder: Path) -> np.ndarray:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        tokens = tokenizer(text, truncation=True, return_tensors="pt")
        ids = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        rows.append(model(**ids).logits.numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize("kind", TEXT_MODELS)
def test_logits_equal_those_of_the_original_model(kind, tmp_path):
    model = save_text_classifier(tmp_path / "model", kind)
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle")
    expected = original_logits(model, tmp_path / "model")
    assert expected.std(0).min() > 0
    scale = float(np.abs(expected).max())
    assert bundle_logits(tmp_path / "bundle", TEXTS) == pytest.approx(expected, abs=1e-5 * scale)


@pytest.mark.parametrize(
    "trained",
    [
        {"problem_type": "multi_label_classification"},
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    ],
)
def test_a_classifier_with_one_output_answers_for_its_only_class(trained, tmp_path):
    model = save_text_classifier(
        tmp_path / "model", num_labels=1, id2label={0: "relevant"}, **trained
    )
    bundle = tmp_path / "bundle"
    import_classifier(str(tmp_path / "model"), bundle)
    expected = original_logits(model, tmp_path / "model")
    assert expected.shape == (len(TEXTS), 1)
    assert bundle_logits(bundle, TEXTS) == pytest.approx(expected, abs=1e-5)
    threshold = float(np.median(expected))
    answer = ask(bundle, "--class", "relevant", "--threshold", threshold, "--json", "--text", "cat")
    (verdict,) = json.loads(answer)["results"][0]["verdicts"]
    assert verdict["match"] == (verdict["score"] >= threshold)
    assert json.loads(answer)["aligned"]
    assert "relevant" in ask(bundle, "--text", "cat")  # the top classes


@pytest.mark.parametrize("kind", UNSUPPORTED_TEXT_MODELS)
def test_models_whose_logits_depend_on_the_padding_are_rejected(kind, tmp_path):
    model = save_text_classifier(tmp_path / "model", kind)
    with pytest.raises(ValueError, match=f"{type(model).__name__} would differ"):
        import_classifier(str(tmp_path / "model"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_texts_are_truncated_to_the_length_of_the_tokenizer_or_the_given_one(tmp_path):
    save_text_classifier(tmp_path / "model")
    for wanted, length in ((None, MAX_LENGTH), (8, 8)):
        bundle = tmp_path / f"bundle-{length}"
        import_classifier(str(tmp_path / "model"), bundle, max_length=wanted)
        model = Model.open(bundle)
        assert len(model.prepare(TEXTS[-1])) == length
