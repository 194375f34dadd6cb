"""The ONNX backbone gives the same verdicts as torch, and errors are clear if it cannot be used."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from torch import Tensor

from serving.answer import make_query
from serving.model import Model
from tests.noise_images import image
from tests.tiny_bundle import (
    IMAGE,
    WAYS_TO_ASK,
    tiny_backbone,
    tiny_text_backbone,
    write,
    write_of_texts,
)
from trainer.backbone import onnx_backbone
from trainer.backbone.backbone import Backbone
from trainer.backbone.onnx_backbone import BF16, OnnxBackbone, write_onnx


def of_images(path: Path) -> Path:
    return write(path, write_onnx=lambda file: write_onnx(tiny_backbone(), IMAGE, file))


def of_crops(path: Path, images: Path) -> Path:
    """Copy the bundle `images`, but with ten crops per image."""
    shutil.copytree(images, path)
    content = json.loads((path / "bundle.json").read_text())
    content["model"]["image"].update(resize=20, crops=10)
    (path / "bundle.json").write_text(json.dumps(content))
    return path


def of_texts(path: Path) -> Path:
    return write_of_texts(
        path, write_onnx=lambda file: write_onnx(tiny_text_backbone(), None, file)
    )


def images() -> list[bytes]:
    return [image(0, *size) for size in ((20, 33), (16, 16), (40, 21))]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        "images": of_images(folder / "images"),
        "crops": of_crops(folder / "crops", folder / "images"),
        "texts": of_texts(folder / "texts"),
    }


@pytest.mark.parametrize("kind", ["images", "crops", "texts"])
def test_onnxruntime_returns_the_same_verdicts_as_torch_for_any_batch_size(
    kind: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model.open(bundles[kind])
    monkeypatch.setattr("serving.model.onnx_is_installed", lambda: False)
    other = Model(model.bundle)
    assert (model.engine, other.engine) == ("onnxruntime", "torch")
    model.bundle.verify()
    model.self_check()
    raw = ["a cat", "猫 und a dog " * 20, "x"] if kind == "texts" else images()
    query = make_query(model.bundle, list(WAYS_TO_ASK), threshold=0.1)
    for inputs in (raw, raw[:1], raw * 3):
        prepared = [model.prepare(one) for one in inputs]
        found = model.answer(prepared, query).model_dump()["results"]
        wanted = other.answer(prepared, query).model_dump()["results"]
        for ours, theirs in zip(found, wanted, strict=True):
            for verdict, expected in zip(ours["verdicts"], theirs["verdicts"], strict=True):
                assert verdict.pop("score") == pytest.approx(expected.pop("score"), abs=1e-4)
                assert verdict == expected


def test_a_warning_is_logged_if_the_onnx_backbone_cannot_be_used(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serving.model.onnx_is_installed", lambda: False)
    with caplog.at_level(logging.WARNING, "kway.serving"):
        assert Model.open(bundles["images"]).engine == "torch"
    assert "onnxruntime is not installed" in caplog.text


def test_an_onnx_backbone_with_different_results_is_rejected_and_leaves_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Off(OnnxBackbone):
        def __call__(self, inputs: dict[str, Tensor]) -> Tensor:
            return super().__call__(inputs) * 1.001

    monkeypatch.setattr(onnx_backbone, "OnnxBackbone", Off)
    with pytest.raises(ValueError, match=r"1\.0e-03"):
        of_images(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_cannot_be_exported_raises_a_one_line_error(tmp_path: Path) -> None:
    class Branching(Backbone):
        def _pooled(self, output: object, mask: Tensor | None) -> Tensor:
            pooled = super()._pooled(output, mask)
            return pooled if float(pooled.sum()) > 0 else -pooled

    backbone = Branching(tiny_backbone().encoder, pooling="auto", image=IMAGE)
    with pytest.raises(ValueError, match=r"ONNX .*: use --precision bf16$") as caught:
        write_onnx(backbone, IMAGE, tmp_path / "b.onnx", remedy=BF16)
    assert "\n" not in str(caught.value)
