"""The commands and lists in docs/import.md, and the example for Partial FC."""

import shlex
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, normalize

from serving.model import Model
from tests.noise_images import image
from tests.serving.in_process import application, ask
from tests.shards import write_images
from tests.trainer.tiny_classifiers import save_image_classifier

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "import.md").read_text(encoding="utf-8")


def commands(heading: str) -> list[list[str]]:
    """Return the arguments of the `kway` commands in a section of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("    kway ")]
    return [shlex.split(line)[1:] for line in lines]


def test_the_commands_of_the_quick_start_work(
    tmp_path, monkeypatch: pytest.MonkeyPatch, kway, capsys
):
    monkeypatch.chdir(tmp_path)
    names = dict(enumerate(["husky", "samoyed", "malamute", "tabby cat", "siamese cat"]))
    save_image_classifier(Path("my-model"), id2label=names)
    write_images(Path("labeled"))
    for number, folder in enumerate(sorted(Path("labeled").iterdir())):
        folder.rename(folder.with_name(names[number]))
    Path("photo.png").write_bytes(image(0))
    done = []
    for arguments in commands("Quick start"):
        capsys.readouterr()
        if arguments[0] == "serve":
            served = ask(application(Path(arguments[1])), "GET", "/v1/model").json()
            assert served["num_classes"] == 5
        else:
            assert kway(*arguments) == 0, capsys.readouterr().err
        printed = capsys.readouterr()
        assert "Loading weights" not in printed.err  # the progress that transformers reports
        done.append((arguments[0], printed.out))
    assert [name for name, _ in done] == ["import", "query", "serve", "shard", "calibrate", "query"]
    assert "threshold" not in done[1][1]
    assert "threshold" in done[-1][1]


MY_FACES = """
from torch import nn

class IResNet100(nn.Module):
    dim = 6

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=28), nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6)
        )

    def forward(self, pixels):
        return self.layers(pixels)
"""


def test_the_example_for_partial_fc_writes_a_bundle_with_its_logits(
    tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_faces.py").write_text(MY_FACES)
    from my_faces import IResNet100  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model, rows = IResNet100(), torch.randn(23, 6)
    model(torch.randn(9, 3, 112, 112))  # sets the averages of batch norm
    torch.save(model.eval().state_dict(), "backbone.pt")
    # Partial FC gives the first ranks one class more. Eleven ranks test that 10 comes after 9.
    for rank, part in enumerate(torch.tensor_split(rows, 11)):
        torch.save({"weight": part.clone()}, f"softmax_fc_gpu_{rank}.pt")
    exec((ROOT / "examples" / "import_partial_fc.py").read_text(encoding="utf-8"), {})
    served = Model.open(Path("bundle"), allow_imports=["my_faces:IResNet100"])
    served.self_check()
    pixels = served.prepare(image(0))
    with torch.inference_mode():
        # `PartialFC_V2.forward` of InsightFace, without the margin, which applies in training.
        features = model((pixels[None] / 255 - 0.5) / 0.5)
        expected = 64 * linear(normalize(features), normalize(rows))
    found = served.bundle.logits(served.features([pixels]), range(23))
    torch.testing.assert_close(found, expected)
