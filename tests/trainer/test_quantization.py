"""`kway quantize`: bundles whose backbone runs in bf16 or int8."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.shards.split import open_split
from serving.answer import make_query
from serving.model import Model
from tests.ranks import rank_world
from tests.shards import glyph_recipe, text_recipe
from trainer.backbone.precision import check_processor
from trainer.bundle.calibration import calibrate
from trainer.bundle.calibration_options import CalibrationOptions
from trainer.bundle.export import export_run
from trainer.train import train


def require(precision: str) -> None:
    try:
        check_processor(precision)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def bundles(
    finished: Path, glyphs: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    crops = {"data__image__resize": 20, "data__image__crops": 10}
    recipes = {
        "crops": glyph_recipe(glyphs, folder / "crops run", **crops),
        "texts": text_recipe(texts, folder / "texts run"),
    }
    for kind, recipe in recipes.items():
        train(recipe, rank_world())
        export_run(folder / f"{kind} run", folder / kind, rank_world())
    return {"images": finished / "bundle", **{kind: folder / kind for kind in recipes}}


def prepared_samples(model: Model, shards: Path) -> tuple[list[Any], torch.Tensor]:
    """Return the inputs of the test split, and their labels [N]."""
    with open_split(shards, "test") as split:
        raw = [split.read(number)[0] for number in range(len(split))]
        labels = torch.from_numpy(np.asarray(split.labels, np.int64))
    is_text = model.reads == "texts"
    return [model.prepare(one.decode() if is_text else one) for one in raw], labels


@pytest.mark.parametrize(
    ("kind", "precision"),
    [("crops", "int8"), ("texts", "bf16")],
)
def test_the_thresholds_belong_to_the_served_scores_alone_or_in_a_batch(
    precision, kind, bundles, glyphs, texts, tmp_path, kway, capsys
):
    require(precision)
    out, shards = tmp_path / "low", texts / "shards" if kind == "texts" else glyphs
    assert kway("quantize", bundles[kind], shards, "-o", out, "--precision", precision) == 0
    assert "same top-1 class" in capsys.readouterr().out
    original, model = Model.open(bundles[kind]), Model.open(out)
    model.bundle.verify()
    model.self_check()
    assert model.crops == (10 if kind == "crops" else 1)
    assert model.engine == ("onnxruntime" if precision == "int8" else "torch")
    prepared, labels = prepared_samples(model, shards)
    features, wanted = model.features(prepared), original.features(prepared)
    assert not torch.equal(features, wanted)
    assert torch.cosine_similarity(features, wanted).min() > 0.99
    alone = torch.cat([model.features([one]) for one in prepared])
    # The padding of texts changes the order of sums, which can change the last bit of bf16.
    tolerance = 2**-7 if (kind, precision) == ("texts", "bf16") else 1e-5
    assert (features - alone).abs().max() <= tolerance * features.abs().max()
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
    again = calibrate(out, shards, tmp_path / "again", CalibrationOptions())
    assert np.array_equal(again.thresholds.thresholds, thresholds.thresholds)
    assert kway("quantize", out, shards, "-o", tmp_path / "b", "--precision", "bf16") == 2
    assert "pass the bundle in float32" in capsys.readouterr().err


def test_a_processor_without_support_is_rejected_in_one_line():
    check_processor("float32", frozenset())
    for precision in ("bf16", "int8"):
        with pytest.raises(ValueError, match=rf"^precision {precision} requires.*float32$"):
            check_processor(precision, frozenset({"avx2"}))
