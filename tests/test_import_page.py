"""The commands and lists in docs/import.md."""

import re
import shlex
from pathlib import Path

import pytest

from tests.serving.in_process import application, ask
from tests.serving.page_driver import image
from tests.shards import write_images
from tests.trainer.tiny_classifiers import IMAGE_MODELS, TEXT_MODELS, save_image_classifier

PAGE = (Path(__file__).parents[1] / "docs" / "import.md").read_text(encoding="utf-8")


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
        done.append((arguments[0], capsys.readouterr().out))
    assert [name for name, _ in done] == ["import", "query", "serve", "shard", "calibrate", "query"]
    assert "threshold" not in done[1][1]
    assert "threshold" in done[-1][1]


def test_the_page_lists_the_tested_models():
    section = PAGE.partition("### Models")[2].partition("Other types")[0]
    listed = {
        kind: re.findall(r"`([\w-]+)`", rest.partition("\n- ")[0])
        for kind, rest in (
            ("images", section.partition("- images:")[2]),
            ("texts", section.partition("- texts:")[2]),
        )
    }
    assert listed == {"images": sorted(IMAGE_MODELS), "texts": sorted(TEXT_MODELS)}
