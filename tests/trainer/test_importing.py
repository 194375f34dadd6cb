"""What `kway import` writes, and what it rejects."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hub import serve_model
from tests.system.processes import environment
from tests.trainer.tiny_classifiers import (
    IMAGE_MODELS,
    IMAGE_PROCESSORS,
    NAMES,
    save_image_classifier,
    save_text_classifier,
)
from trainer.bundle.bundle import Bundle
from trainer.importing.classifier import Imported, import_classifier

Kway = Callable[..., int]


def imported(folder: Path, **options: Any) -> Imported:
    return import_classifier(str(folder), folder.with_name("bundle"), **options)


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_rows_biases_and_names_of_the_classifier_become_those_of_the_classes(tmp_path):
    model = save_image_classifier(tmp_path / "model")
    imported(tmp_path / "model")
    with Bundle.open(tmp_path / "bundle") as bundle:
        bundle.verify()
        rows = bundle.rows(range(len(NAMES)))
        assert torch.equal(rows.rows, model.classifier.weight)
        assert rows.bias is not None
        assert torch.equal(rows.bias, model.classifier.bias)
        names = [entry.name for entry in bundle.classes]
        assert names == ["husky", "tabby cat", "crane (2)", "crane (3)", "class 4"]
        assert bundle.classes[3].attributes == {"label": "crane"}
        assert bundle.spec.loss.kind == "ce"
        assert not bundle.spec.loss.aligned
        assert bundle.spec.recalls == ()


def test_a_classifier_whose_hidden_size_equals_the_number_of_classes_is_imported(tmp_path):
    names = dict(enumerate("abcdefghijklmnop"))
    for kind in ("electra", "roberta"):
        folder = tmp_path / kind / "model"
        save_text_classifier(folder, kind, id2label=names, num_labels=16)
        assert imported(folder).difference < 1e-5


# ---- rejected models ----


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()


def no_classifier_weights(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["classifier.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def damaged_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def no_crop(folder: Path) -> None:
    type(IMAGE_PROCESSORS["stretched"])(size={"shortest_edge": 32}).save_pretrained(folder)


def huge_images(folder: Path) -> None:
    size = {"height": 100_000, "width": 100_000}
    type(IMAGE_PROCESSORS["stretched"])(size=size).save_pretrained(folder)


def nested_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


REJECTED: list[tuple[Callable[[Path], object], str]] = [
    (only_pickle, r"has no \*.safetensors: .*does not read pickles; convert .*`python"),
    (no_processor, "has no image processor"),
    (no_classifier_weights, "no trained weights for classifier.weight of ViTForImage"),
    (damaged_weights, "the weights of ViTForImageClassification cannot be loaded"),
    (no_crop, "its image processor ViTImageProcessor.* cannot"),
    (huge_images, "has sides over 4096 pixels"),
    (nested_config, "config.json does not describe"),
    (lambda folder: edit_config(folder, hidden_size="wide"), "config.json does not describe"),
    (lambda folder: edit_config(folder, problem_type="regression"), "is a regression model"),
    (
        lambda folder: edit_config(folder, id2label={"0": "a"}, num_labels=1),
        "If its output was trained with a sigmoid, set problem_type",
    ),
    (
        lambda folder: edit_config(folder, architectures=["ViTForMaskedImageModeling"]),
        "ViTForMaskedImageModeling is not a classifier",
    ),
    (lambda folder: edit_config(folder, quantization_config={"quant_method": "awq"}), "quantized"),
]


@pytest.mark.parametrize(("spoil", "reason"), REJECTED)
def test_a_model_that_cannot_be_imported_is_rejected_in_one_line(
    spoil, reason, tmp_path, kway: Kway, capsys
):
    save_image_classifier(tmp_path / "model")
    spoil(tmp_path / "model")
    capsys.readouterr()  # transformers reports the progress of saving
    assert kway("import", tmp_path / "model", "-o", tmp_path / "bundle") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_with_two_classifiers_is_rejected(tmp_path, monkeypatch):
    architecture = "DeiTForImageClassificationWithTeacher"
    monkeypatch.setitem(IMAGE_MODELS["deit"], "architectures", [architecture])
    save_image_classifier(tmp_path / "model", "deit", IMAGE_PROCESSORS["64 pixels"])
    with pytest.raises(ValueError, match=architecture):
        imported(tmp_path / "model")


def test_flipped_channels_are_rejected(tmp_path):
    from transformers.models.mobilevit.image_processing_pil_mobilevit import (
        MobileViTImageProcessorPil,
    )

    processor = MobileViTImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    save_image_classifier(tmp_path / "model", "resnet", processor)
    with pytest.raises(ValueError, match="MobileViTImageProcessorPil cannot be reproduced"):
        imported(tmp_path / "model")


def test_a_timm_model_cannot_name_files_or_the_hub():
    from transformers import TimmWrapperConfig

    from trainer.backbone.transformers_models import check_timm

    for options, reason in (
        ({"architecture": "hf-hub:someone/model"}, "architecture is"),
        ({"architecture": "resnet18", "model_args": {"checkpoint_path": "x.pth"}}, "remove it"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_timm(TimmWrapperConfig(**options))


# The process imports a model from the hub and waits until the hub is gone. Then it prints errors
# for a model and a tokenizer that are not cached.
USES_OF_THE_HUB = """
from pathlib import Path
from data.text.tokenizer import open_tokenizer
from trainer.backbone.backbone import build_backbone
from trainer.backbone.config import BackboneConfig
from trainer.importing.classifier import import_classifier

def print_weights():
    named = BackboneConfig(name='team/animals', weights='pretrained')
    print(sum(float(p.sum()) for p in build_backbone(named, image=None).parameters()))

import_classifier('hub:team/animals', Path({out!r}))
print_weights()
input()
print_weights()
for name in ('backbone', 'tokenizer'):
    try:
        if name == 'tokenizer':
            open_tokenizer('hub:team/others', max_length=9)
        else:
            build_backbone(BackboneConfig(name='team/others'), image=None)
    except (ValueError, OSError) as error:
        print(error)
"""


def test_a_model_on_the_hub_is_downloaded_without_its_pickles_and_used_without_a_network(tmp_path):
    """Without a network, transformers would retry for half a minute and log every attempt."""
    model = save_image_classifier(tmp_path / "model")
    for name in ("pytorch_model.bin", "code.py"):
        (tmp_path / "model" / name).write_bytes(b"never read")
    out = tmp_path / "bundle"
    with serve_model("team/animals", tmp_path / "model") as (endpoint, downloaded):
        # huggingface_hub reads its environment on import.
        hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", USES_OF_THE_HUB.format(out=str(out))],
            env={**environment(), **hub},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        online = process.stdout.readline()
    offline, errors = process.communicate("the hub is gone\n", timeout=120)
    assert process.returncode == 0, errors
    assert set(downloaded) == {"config.json", "model.safetensors", "preprocessor_config.json"}
    with Bundle.open(out) as bundle:
        assert torch.equal(bundle.rows([1]).rows[0], model.classifier.weight[1])
    assert "Retrying" not in errors
    weights, of_backbone, of_tokenizer = offline.splitlines()
    assert weights == online.strip()
    assert re.search(r"hf download team/others .*set backbone.name=FOLDER", of_backbone)
    assert re.search(r"hf download team/others .*set data.text.tokenizer=FOLDER", of_tokenizer)


def test_an_unknown_name_on_the_hub_is_rejected(tmp_path, kway: Kway, capsys):
    assert kway("import", "hub:not a name", "-o", tmp_path / "bundle") == 2
    assert "hub:not a name was not found on the hub" in capsys.readouterr().err


def test_class_names_can_be_replaced(tmp_path):
    save_image_classifier(tmp_path / "model")
    file = tmp_path / "names.txt"
    file.write_text("a\nb\nc\nd\ne\n")
    imported(tmp_path / "model", class_names=file)
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert [entry.name for entry in bundle.classes] == list("abcde")
    file.write_text("a\nb\n")
    with pytest.raises(ValueError, match="has 2 lines, but the model has 5 classes"):
        imported(tmp_path / "model", class_names=file, force=True)
