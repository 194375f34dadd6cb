"""An imported image classifier returns the logits of the original model, from image file to
score."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tests.trainer.tiny_classifiers import (
    IMAGE_MODELS,
    IMAGE_PROCESSORS,
    bundle_logits,
    save_image_classifier,
)
from trainer.importing.classifier import import_classifier


def image_files() -> list[bytes]:
    """Return smooth images with noise as PNG and JPEG, in portrait and landscape format."""
    rng = np.random.default_rng(3)
    files = []
    for width, height in ((200, 117), (51, 90)):
        small = Image.fromarray(rng.integers(0, 256, (7, 7, 3), np.uint8)).resize((width, height))
        for kind in ("png", "jpeg"):
            file = io.BytesIO()
            small.save(file, kind)
            files.append(file.getvalue())
    return files


@torch.inference_mode()
def original_logits(model, processor, files: list[bytes]) -> np.ndarray:
    opened = [Image.open(io.BytesIO(file)) for file in files]
    return model(**processor(opened, return_tensors="pt")).logits.numpy()


# The processor of each architecture. All processors occur.
PROCESSORS = {
    "clip": "stretched",
    "convnext": "cropped to 7/8",
    "deit": "cropped",
    "dinov2": "cropped by levit",
    "efficientnet": "divided twice",
    "mobilevitv2": "64 pixels",
    "resnet": "64 pixels",
    "swin": "cropped",
    "vit": "stretched",
}


@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_logits_equal_those_of_the_original_model_and_processor(kind, tmp_path):
    processor = IMAGE_PROCESSORS[PROCESSORS[kind]]
    model = save_image_classifier(tmp_path / "model", kind, processor)
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle")
    files = image_files()
    expected = original_logits(model, processor, files)
    assert expected.std(0).min() > 0
    scale = float(np.abs(expected).max())
    assert bundle_logits(tmp_path / "bundle", files) == pytest.approx(expected, abs=1e-5 * scale)
