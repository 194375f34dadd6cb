"""The tables of `kway demo`. test_commands.py tests the complete demo."""

import json
from pathlib import Path

from rich.console import Console

from data.shards.split import open_split
from launch.commands.demo import RUNS, comparison, make_queries


def test_the_first_image_is_queried_for_its_own_class(glyphs: Path, tmp_path: Path) -> None:
    queries = make_queries(glyphs, tmp_path)
    with open_split(glyphs, "test") as split:
        contents = [split.read(index) for index in range(len(split))]
        names = [info.name for info in split.classes]
    classes = {content: names[label] for content, _, label in contents}
    for image, true_class, _ in queries:
        assert classes[image.read_bytes()] == true_class
    assert [queried == true_class for _, true_class, queried in queries] == [True, False, False]


def test_measures_are_compared_in_percent(tmp_path: Path) -> None:
    for number, run in enumerate(RUNS):
        folder = run.folder(tmp_path)
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
        (folder / "evaluations").mkdir()
        names = ("top1", "top5", "sa", "auprc", "precision_at_recall_0.9")
        measures = dict.fromkeys(names, 0.5 + number / 1000)
        (folder / "evaluations" / "step-00000004.json").write_text(json.dumps(measures))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(comparison(tmp_path))
    assert "│ dense x batch_ce     │ 50.1% │" in captured.get()
