"""An imported timm model returns the logits of timm. Skipped unless timm and torchvision are
installed."""

import io

import pytest
import torch
from PIL import Image

from serving.model import Model
from tests.trainer.test_imported_images import image_files
from trainer.importing.classifier import ImportOptions, import_classifier

timm = pytest.importorskip("timm")


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "vit_tiny_patch16_224",
        "convnext_atto",
        "mobilenetv3_small_050",
        "swin_s3_tiny_224",
    ],
)
def test_logits_equal_those_of_timm(name, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7).eval()
    timm.models.save_for_hf(model, tmp_path / "model", safe_serialization=True)
    import_classifier(str(tmp_path / "model"), tmp_path / "bundle", ImportOptions())
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    imported = Model.open(tmp_path / "bundle")
    for kind, file in image_files().items():
        with torch.inference_mode():
            expected = model(transform(Image.open(io.BytesIO(file)))[None])
        found = imported.bundle.logits(imported.features([imported.prepare(file)]), range(7))
        scale = float(expected.abs().max())
        assert found.tolist() == pytest.approx(expected, abs=1e-5 * scale), kind
