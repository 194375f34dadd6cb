"""`kway quantize`: bundles whose backbone runs in bf16 or int8."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.shards.split import open_split
from serving.answer import make_query
from serving.model import Model
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from trainer.backbone.precision import check_processor
from trainer.bundle.bundle import Bundle
from trainer.bundle.calibration import CalibrationOptions, calibrate
from trainer.bundle.export import export_run
from trainer.train import train


def require(precision: str) -> None:
    try:
        check_processor(precision)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def exported(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    train(glyph_recipe(glyphs, folder / "run"), rank_world())
    export_run(folder / "run", folder / "bundle", rank_world())
    return folder / "bundle"


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_the_thresholds_belong_to_the_served_scores(
    precision, exported, glyphs, tmp_path, kway, capsys
):
    require(precision)
    out = tmp_path / "low"
    assert kway("quantize", exported, glyphs, "-o", out, "--precision", precision) == 0
    assert "same top-1 class" in capsys.readouterr().out
    original, model = Model.open(exported), Model.open(out)
    model.bundle.verify()
    model.self_check()
    assert model.engine == ("onnxruntime" if precision == "int8" else "torch")
    with open_split(glyphs, "test") as split:
        prepared = [model.prepare(split.read(number)[0]) for number in range(len(split))]
        labels = torch.from_numpy(np.asarray(split.labels, np.int64))
    features, wanted = model.features(prepared), original.features(prepared)
    assert not torch.equal(features, wanted)
    assert torch.cosine_similarity(features, wanted).min() > 0.99
    classes = range(model.bundle.spec.num_classes)
    answered = model.answer(prepared, make_query(model.bundle, list(classes), recall=0.9))
    match = torch.tensor([[v.match for v in result.verdicts] for result in answered.results])
    own = torch.arange(len(classes)) == labels[:, None]
    thresholds = model.bundle.thresholds
    assert thresholds is not None
    assert thresholds.reached is not None
    counts = torch.stack([(match & own).sum(0), match.sum(0)], 1)
    assert np.abs(counts.numpy() - thresholds.reached[:, 0]).max() <= 1
    assert f"top-1 accuracy, {precision}" in (out / "MODEL_CARD.md").read_text()
    again = calibrate(out, glyphs, tmp_path / "again", CalibrationOptions())
    assert np.array_equal(again.thresholds.thresholds, thresholds.thresholds)
    assert kway("quantize", out, glyphs, "-o", tmp_path / "b", "--precision", "bf16") == 2
    assert "pass the bundle in float32" in capsys.readouterr().err


def test_a_processor_without_support_is_rejected_in_one_line():
    check_processor("float32", frozenset())
    for precision in ("bf16", "int8"):
        with pytest.raises(ValueError, match=rf"^precision {precision} requires.*float32$"):
            check_processor(precision, frozenset({"avx2"}))


def test_a_bundle_in_float32_has_no_key_that_older_versions_reject(exported):
    content = json.loads((exported / "bundle.json").read_text())
    assert "precision" not in content["model"]
    with Bundle.open(exported) as bundle:
        assert bundle.spec.precision == "float32"
