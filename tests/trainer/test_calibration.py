"""`kway calibrate`: thresholds from labeled shards."""

from pathlib import Path

import numpy as np
import pytest

from data.shards.split import open_split
from serving.answer import make_query
from serving.model import Model
from tests.trainer.tiny_classifiers import save_image_classifier
from trainer.bundle.bundle import Bundle
from trainer.bundle.calibration import calibrate
from trainer.bundle.calibration_options import CalibrationOptions
from trainer.importing.classifier import import_classifier


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A bundle of a transformers model for the classes of the shards `images`."""
    names = {number: f"class {4 - number}" for number in range(5)}
    save_image_classifier(tmp_path / "model", id2label=names)
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.parametrize("block_bytes", [1, 2**26])
def test_the_thresholds_equal_those_of_the_evaluation_after_training(
    block_bytes, finished, glyphs, tmp_path, monkeypatch
):
    """In blocks of one class, and in one block."""
    monkeypatch.setattr("trainer.bundle.calibration._BLOCK_BYTES", block_bytes)
    found = calibrate(finished / "bundle", glyphs, tmp_path / "again", CalibrationOptions(batch=7))
    with Bundle.open(finished / "bundle") as before, Bundle.open(tmp_path / "again") as after:
        after.verify()
        old, new = before.thresholds, after.thresholds
        assert old is not None
        assert new is not None
        assert np.array_equal(old.kinds, new.kinds)
        assert np.array_equal(old.positives, new.positives)
        assert np.array_equal(old.reached, new.reached)
        assert new.thresholds == pytest.approx(old.thresholds, rel=1e-4, abs=1e-5)
        assert [entry.recall for entry in new.recalls] == [0.9, 0.99]
        assert found.num_samples == old.positives.sum()


def test_an_imported_model_gets_thresholds_in_place(imported, images, kway, capsys):
    weights = (imported / "class_weights.safetensors").stat().st_ino
    model = Model.open(imported)
    with pytest.raises(ValueError, match="contains no thresholds"):
        make_query(model.bundle, ["class 1"], recall=0.9)
    assert kway("calibrate", imported, images, "--recall", "0.9", "--confidence", "0.8") == 0
    assert "samples of 5 classes, top-1 accuracy" in capsys.readouterr().out
    calibrated = Model.open(imported)
    calibrated.bundle.verify()
    with open_split(images, "test") as split:
        raw = [split.read(number)[0] for number in range(len(split))]
        labels = split.labels
    query = make_query(calibrated.bundle, [f"class {number}" for number in range(5)], recall=0.9)
    answer = calibrated.answer([calibrated.prepare(file) for file in raw], query)
    own = [
        result.verdicts[label].match for result, label in zip(answer.results, labels, strict=True)
    ]
    assert np.mean(own) >= 0.9  # on the samples that set the thresholds
    assert (imported / "class_weights.safetensors").stat().st_ino == weights
    card = (imported / "MODEL_CARD.md").read_text()
    assert card.count("## Thresholds") == 1
    assert "top-1 accuracy 0." in card
    assert card.index("## Thresholds") < card.index("## Use")


def test_a_text_model_is_calibrated_on_texts_only(texts, images, tmp_path, kway, capsys):
    from tests.trainer.tiny_classifiers import save_text_classifier

    names = dict(enumerate(["white", "red", "green", "blue", "black"]))
    save_text_classifier(tmp_path / "model", id2label=names)
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle")
    assert kway("calibrate", tmp_path / "bundle", images) == 2
    assert "contains images, but the model of" in capsys.readouterr().err
    assert kway("calibrate", tmp_path / "bundle", texts / "shards") == 0
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert bundle.positives(bundle.classes.id_of("black")) == 0
        assert bundle.positives(bundle.classes.id_of("red"))


def test_classes_that_the_bundle_does_not_have_are_named(tmp_path, images, kway, capsys):
    save_image_classifier(tmp_path / "model")
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle")
    assert kway("calibrate", tmp_path / "bundle", images) == 2
    assert "4 classes of the shards, such as 'class 0', 'class 1'" in capsys.readouterr().err
