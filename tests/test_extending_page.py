"""Custom components and when they are imported, tested with the files and commands of
docs/extending.md."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np
import pytest

from data.config import ImageConfig
from tests.ranks import rank_world
from tests.serving.in_process import application
from tests.shards import NO_DROPOUT, TINY_BERT, TINY_RESNET, text_recipe
from trainer.backbone.backbone import build_backbone
from trainer.bundle.bundle import Bundle
from trainer.checkpoints import open_checkpoint
from trainer.recipe import build_recipe, load_recipe, make_component
from trainer.train import train

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
COMPONENTS = (
    "my_package.backbones:ConvNet",
    "my_package.losses:ScaledCrossEntropy",
    "my_package.logits:GrowingMargin",
    "my_package.optimizers:Adagrad",
    "my_package.schedules:InverseSqrt",
    "my_package.augmentations:Noise",
)
ALLOWED = [f"--allow-import={path}" for path in COMPONENTS]


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make `folder` the current directory, from which this process and ranks import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        patch.syspath_prepend(folder)
        forget()
        yield
        forget()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A current directory that contains the files of the page."""
    write_files(tmp_path)
    with working_in(tmp_path):
        yield tmp_path


def write_files(folder: Path) -> None:
    for block in blocks("python") + blocks("yaml"):
        file = folder / block.partition("\n")[0].removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(block, encoding="utf-8")


def forget() -> None:
    """Unload the package, so that tests can detect the next import."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def is_loaded() -> bool:
    return any(name.partition(".")[0] == "my_package" for name in sys.modules)


def trained(glyphs: Path, *overrides: str) -> Path:
    """Train the recipe of the page in this process, unload the package and return the run."""
    recipe = load_recipe(Path("mine.yaml"), [f"data.shards={glyphs}", *overrides])
    train(recipe, rank_world())
    forget()
    return recipe.run


@pytest.fixture(scope="module")
def with_run(glyphs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page and a run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    write_files(folder)
    with working_in(folder):
        trained(glyphs, "train.duration.steps=2")
    return folder


@pytest.fixture
def run(here: Path, with_run: Path) -> Path:
    """The run, in a copy of its folder that is the current directory."""
    shutil.copytree(with_run, here, dirs_exist_ok=True)
    return Path("runs/mine")


def test_the_commands_of_the_page_work(here, kway, capsys):
    image = np.zeros((16, 16), np.uint8)
    assert cv2.imwrite(str(here / "image.png"), image)
    (block,) = blocks("sh")
    lines = block.replace("\\\n", "").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("kway ")]
    assert [command[1] for command in commands] == [
        "shard", "plan", "train", "eval", "export", "query",
    ]  # fmt: skip
    for command in commands:
        assert kway(*command[1:]) == 0, capsys.readouterr().err
    spec = json.loads((here / "bundle" / "bundle.json").read_text())["model"]
    assert spec["loss"]["kind"] == COMPONENTS[1]
    assert (spec["logits"]["kind"], spec["logits"]["scale"]) == ("cosine", 8)
    assert spec["backbone"]["kind"] == COMPONENTS[0]
    assert spec["backbone"]["options"] == {"width": 32, "channels": 1}


def test_without_allow_import_no_command_imports_components_of_a_run(run, kway, error_of):
    for command in (
        ["eval", run],
        ["eval", run, *ALLOWED[:-1]],
        ["export", run, "-o", "bundle"],
        ["train", run / "recipe.yaml"],
        ["plan", run / "recipe.yaml"],
        ["doctor", run / "recipe.yaml"],
    ):
        error = error_of(*command)
        assert "custom.0.kind would import code: add" in error or "backbone.kind, head" in error
        assert f"--allow-import {COMPONENTS[-1]} if you trust this code" in error
        assert not is_loaded()
    assert kway("train", run / "recipe.yaml", "--print-config", *ALLOWED) == 0


def test_without_allow_import_no_command_imports_the_backbone_of_a_bundle(run, kway, error_of):
    assert kway("export", run, "-o", "bundle", *ALLOWED) == 0
    forget()
    assert cv2.imwrite("image.png", np.zeros((16, 16), np.uint8))
    for command in (
        ["query", "bundle", "--class", "#3", "image.png"],
        ["index", "bundle", ".", "-o", "gallery"],
        ["serve", "bundle", "--port", "0"],
        ["serve", "bundle", "--port", "0", "--no-ray"],
    ):
        assert f"add --allow-import {COMPONENTS[0]}" in error_of(*command)
        assert not is_loaded()
    assert kway("index", "bundle", ".", "-o", "gallery", f"--allow-import={COMPONENTS[0]}") == 0
    forget()
    application(Path("bundle"), allow_imports=[COMPONENTS[0]])  # of a server
    assert is_loaded()


def assert_answers_without_code(kway) -> None:
    """The bundle in the current directory answers although the package is gone."""
    shutil.rmtree("my_package")
    forget()
    assert cv2.imwrite("image.png", np.zeros((16, 16), np.uint8))
    assert kway("query", "bundle", "--class", "#3", "image.png") == 0
    assert not is_loaded()


def test_a_custom_loss_is_served_without_its_code(here, glyphs, kway, capsys):
    network = json.dumps({"kind": "transformers", "config": {**TINY_RESNET, "num_channels": 1}})
    run = trained(glyphs, "train.duration.steps=2", f"backbone={network}")
    assert kway("export", run, "-o", "bundle", *ALLOWED[1:]) == 0
    assert_answers_without_code(kway)


def test_resuming_reports_a_changed_source_and_rejects_another_class(run, glyphs, capsys):
    source = Path("my_package/losses.py")
    source.write_text(source.read_text() + "\n# changed\n")
    trained(glyphs, "train.duration.steps=3")
    assert f"changed on resume: version.{COMPONENTS[1]}: sha256:" in capsys.readouterr().out
    stored = open_checkpoint(run / "checkpoints" / "step-00000003", rank_world()).state
    assert stored["versions"][COMPONENTS[1]].startswith("sha256:")
    with pytest.raises(ValueError, match=r"was started with different values of head\.loss\.kind"):
        trained(glyphs, "head.loss.kind=ce")
    assert "my_package.losses" not in sys.modules
    # The schedule may change on resume.
    trained(glyphs, "train.duration.steps=4", "schedule.kind=cosine")
    assert "my_package.schedules" not in sys.modules


def test_resuming_rejects_changed_augmentations(run, glyphs):
    path = COMPONENTS[-1]
    stored = open_checkpoint(run / "checkpoints" / "step-00000002", rank_world()).state
    assert stored["versions"][path].startswith("sha256:")
    assert stored["recipe"]["data"]["augment"]["custom"] == [{"kind": path, "std": 8.0}]
    Path("my_package/copied.py").write_text(Path("my_package/augmentations.py").read_text())
    changed = r"was started with different values of data\.augment\.custom(\.kind)?: undo the"
    for value in ("[]", f"[{{kind: '{path}', std: 9}}]", "[{kind: 'my_package.copied:Noise'}]"):
        with pytest.raises(ValueError, match=changed):
            trained(glyphs, "train.duration.steps=3", f"data.augment.custom={value}")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backbone.widht=3", r"backbone\.widht is not a known key: did you mean width\?"),
        ("optimizer.kind=my_pakage.x:Y", r"no module named my_pakage: install it"),
        ("optimizer.kind=my_package.optimizers:Adagrd", r"has no Adagrd: did you mean Adagrad\?"),
        ("optimizer.kind=torch.optim:SGD", r"must be a subclass of trainer\.optimizers\.base\.Opt"),
        ("head.loss.kind=heads:Loss", r"must define aligned, statistics, value"),
        ("data.augment.custom=[{kind: 'a.b:'}]", r"custom\.0\.kind is 'a\.b:': use module:Class"),
        ("data.augment.custom=[{kind: flip}]", r"custom\.0: set kind to the import path"),
        (
            "data.augment.custom=[{kind: 'my_package.augmentations:Noise', std: 0}]",
            r"data\.augment\.custom\.0\.std: .*greater than 0, got 0",
        ),
        ("head.loss.kind=my_package.broken:X", r"my_package\.broken cannot be imported: "),
        ("train.strategy.kind=my_package.x:Y", r"train\.strategy\.kind is 'my_package\.x:Y': choo"),
    ],
)
def test_an_invalid_component_raises_a_one_line_error_that_names_the_key_and_the_fix(
    override, message, here
):
    Path("my_package/broken.py").write_text("import (\n")
    with pytest.raises(ValueError, match=message) as caught:
        load_recipe(Path("mine.yaml"), [override])
    assert "\n" not in str(caught.value)


def test_build_recipe_imports_no_component_without_permission(here):
    tree = {"run": "x", "data": {"shards": "x"}, "backbone": {"kind": COMPONENTS[0]}}
    with pytest.raises(ValueError, match=r"backbone\.kind would import code"):
        build_recipe(tree, origin="test")
    assert not is_loaded()


def test_loading_a_bundle_whose_component_has_changed_logs_a_warning(run, kway, caplog):
    assert kway("export", run, "-o", "bundle", *ALLOWED) == 0
    source = Path("my_package/backbones.py")
    source.write_text(source.read_text() + "\n# changed\n")
    forget()
    with Bundle.open(Path("bundle")) as bundle:
        bundle.load_backbone(allow_imports=[COMPONENTS[0]])
    assert f"was exported with {COMPONENTS[0]} version sha256:" in caplog.text


TEXT_BACKBONE = """
from transformers import BertConfig, BertModel


def bert(vocab_size: int, **fields):
    return BertModel(BertConfig(vocab_size=vocab_size, **fields), add_pooling_layer=False)
"""


def test_a_custom_text_backbone_is_trained_and_exported(here, texts, kway):
    Path("my_package/texts.py").write_text(TEXT_BACKBONE)
    backbone = {"kind": "my_package.texts:bert", "pooling": "mean", **TINY_BERT, **NO_DROPOUT}
    backbone |= {"vocab_size": 120}
    del backbone["model_type"]
    component = make_component(backbone, key="backbone", origin="test")
    recipe = text_recipe(texts, here / "run").model_copy(update={"backbone": component})
    train(recipe, rank_world())
    allowed = f"--allow-import={backbone['kind']}"
    assert kway("export", here / "run", "-o", "bundle", allowed) == 0
    assert kway("query", "bundle", "--class", "red", "--text", "red", allowed) == 0


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make(): return 3", "returns an object of type int: make it return an nn.Module"),
        ("def make(): return nn.Linear(2, 2)", "does not define its number of features"),
        (
            "def make(pooling: str): pass",
            "parameter named pooling, but every backbone has an option",
        ),
    ],
)
def test_a_component_that_is_not_a_backbone_raises_a_one_line_error(code, message, here):
    Path("my_package/made.py").write_text(f"from torch import nn\n{code}\n")
    options = {"kind": "my_package.made:make"}
    with pytest.raises(ValueError, match=message) as caught:
        build_backbone(make_component(options, key="backbone", origin="test"), image=ImageConfig())
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_an_onnx_backbone_is_served_without_its_code(run, kway):
    assert kway("export", run, "-o", "bundle", "--onnx", *ALLOWED) == 0
    assert_answers_without_code(kway)
