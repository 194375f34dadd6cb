"""Class weights of Partial FC, with a backbone that is a user's own module."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from serving.model import Model
from tests.serving.page_driver import image
from tests.tiny_bundle import write
from trainer.bundle.bundle import Bundle
from trainer.importing.classifier import ImportOptions
from trainer.importing.partial_fc import import_partial_fc

KIND = "tests.trainer.test_partial_fc:Faces"
IMAGE = {"size": 16, "mean": [0.5] * 3, "std": [0.5] * 3}
NUM_CLASSES, DIM, SCALE = 11, 6, 30.0


class Faces(nn.Module):
    """Stands for the IResNet of InsightFace: a convolution, a linear layer and batch norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=4), nn.Flatten(), nn.Linear(64, dim), nn.BatchNorm1d(dim)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels)


def write_run(folder: Path, suffix: str = "safetensors") -> tuple[Faces, torch.Tensor]:
    """Write a run of three ranks, and return the backbone and the rows."""
    folder.mkdir()
    torch.manual_seed(0)
    model, rows = Faces(DIM).eval(), torch.randn(NUM_CLASSES, DIM)
    model(torch.randn(2, 3, 16, 16))
    save_file(model.state_dict(), folder / "backbone.safetensors")
    # Partial FC gives the first ranks one class more. Ten ranks test that 10 comes after 9.
    for rank, part in enumerate(torch.tensor_split(rows, 11)):
        file = folder / f"softmax_fc_gpu_{rank}.{suffix}"
        match suffix:
            case "safetensors":
                save_file({"weight": part.contiguous()}, file)
            case "npy":
                np.save(file, part.numpy())
            case "pt":
                torch.save({"weight": part.clone()}, file)
    describe(folder, rows=f"softmax_fc_gpu_*.{suffix}")
    return model, rows


def describe(folder: Path, **changes: object) -> Path:
    tree = {
        "backbone": {"kind": KIND, "dim": DIM},
        "backbone_weights": "backbone.safetensors",
        "image": IMAGE,
        "scale": SCALE,
        **changes,
    }
    file = folder / "faces.yaml"
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
    return file


@pytest.mark.parametrize("suffix", ["safetensors", "npy"])
def test_logits_equal_those_of_partial_fc(suffix, tmp_path):
    model, rows = write_run(tmp_path / "run", suffix)
    names = tmp_path / "names.txt"
    names.write_text("\n".join(f"person {number}" for number in range(NUM_CLASSES)))
    import_partial_fc(
        tmp_path / "run/faces.yaml", tmp_path / "bundle", ImportOptions(class_names=names)
    )
    served = Model.open(tmp_path / "bundle", allow_imports=[KIND])
    served.self_check()
    assert served.bundle.names.names[10] == "person 10"
    pixels = served.prepare(image(0))
    with torch.inference_mode():
        # `PartialFC_V2.forward` of InsightFace, without the margin, which applies in training.
        features = model((pixels[None] / 255 - 0.5) / 0.5)
        expected = nn.functional.linear(
            nn.functional.normalize(features), nn.functional.normalize(rows)
        )
    found = served.bundle.logits(served.features([pixels]), range(NUM_CLASSES))
    torch.testing.assert_close(found, SCALE * expected)


def test_the_rows_of_a_run_can_be_added_to_the_backbone_of_a_bundle(tmp_path):
    bundle = write(tmp_path / "other")
    folder = tmp_path / "run"
    folder.mkdir()
    np.save(folder / "rows.npy", np.random.default_rng(0).standard_normal((4, 16), np.float32))
    gray = {"size": 16, "channels": 1, "mean": [0.5], "std": [0.25]}
    file = describe(
        folder, rows="rows.npy", backbone={"init": str(bundle)}, backbone_weights=None, image=gray
    )
    import_partial_fc(file, tmp_path / "bundle", ImportOptions())
    with Bundle.open(tmp_path / "bundle") as found, Bundle.open(bundle) as original:
        inputs = {"pixel_values": torch.zeros(1, 1, 16, 16, dtype=torch.uint8)}
        assert torch.equal(found.load_backbone()(inputs), original.load_backbone()(inputs))
        assert list(found.names.names) == [f"class {number}" for number in range(4)]


def test_a_pickle_is_rejected_and_the_printed_command_converts_it(tmp_path, kway, capsys):
    _, rows = write_run(tmp_path / "run", "pt")
    assert kway("import", tmp_path / "run/faces.yaml", "-o", tmp_path / "bundle") == 2
    message = capsys.readouterr().err
    assert "softmax_fc_gpu_0.pt is a pickle" in message
    assert len(message.splitlines()) == 1
    code = message.partition('python -c "')[2].partition('" FILES')[0]
    files = sorted((tmp_path / "run").glob("*.pt"))
    subprocess.run([sys.executable, "-c", code, *files], check=True, timeout=120)
    converted = load_file(tmp_path / "run/softmax_fc_gpu_10.safetensors")["weight"]
    assert torch.equal(converted, rows[10:])
    describe(tmp_path / "run", rows="softmax_fc_gpu_*.safetensors")
    assert kway("import", tmp_path / "run/faces.yaml", "-o", tmp_path / "bundle") == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": "none_*.npy"}, "has no such file"),
        ({"rows": "*.yaml"}, "pass safetensors or npy files"),
        ({"rows": "backbone.safetensors"}, "set tensor to its name"),
        (
            {"rows": "softmax_fc_gpu_*.safetensors", "backbone": {"kind": KIND, "dim": 7}},
            "does not match the backbone",
        ),
        ({"rows": "softmax_fc_gpu_*.safetensors", "backbone_weights": "model.pt"}, "is a pickle"),
        ({"rows": "softmax_fc_gpu_*.safetensors", "scale": -1}, "scale"),
        ({"rows": "softmax_fc_gpu_*.safetensors", "image": None}, "image"),
        ({"rows": "softmax_fc_gpu_*.safetensors", "surprise": 1}, "surprise"),
    ],
)
def test_files_that_do_not_fit_are_reported_in_one_line(changes, reason, tmp_path, kway, capsys):
    write_run(tmp_path / "run")
    file = describe(tmp_path / "run", **changes)
    assert kway("import", file, "-o", tmp_path / "bundle") == 2
    message = capsys.readouterr().err
    assert reason in message
    assert len(message.splitlines()) == 1
    assert not (tmp_path / "bundle").exists()
