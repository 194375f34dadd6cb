"""The tables of `kway demo`. test_commands.py tests the complete demo."""

import json
from pathlib import Path

from rich.console import Console

from data.shards.split import open_split
from launch.demo.queries import make_queries, verdict_table
from launch.demo.runs import RUNS, comparison


def text_of(table: object) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_the_first_image_is_queried_for_its_own_class(glyphs: Path, tmp_path: Path) -> None:
    queries = make_queries(glyphs, tmp_path)
    with open_split(glyphs, "test") as split:
        contents = [split.read(index) for index in range(len(split))]
        names = [info.name for info in split.classes]
    classes = {content: names[label] for content, _, label in contents}
    assert [query.true_class for query in queries] == [
        classes[query.image.read_bytes()] for query in queries
    ]
    assert [query.queried_class == query.true_class for query in queries] == [True, False, False]


def test_verdicts_are_compared_with_the_true_class(glyphs: Path, tmp_path: Path) -> None:
    queries = make_queries(glyphs, tmp_path)
    verdicts = [
        {"match": True, "score": 7.5, "threshold": 5.25, "threshold_source": "shrunk"},
        {"match": False, "score": -1.125, "threshold": 5.25, "threshold_source": "pooled"},
        {"match": True, "score": 6.0, "threshold": 5.25, "threshold_source": "shrunk"},
    ]
    lines = text_of(verdict_table(queries, verdicts)).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if ".png" in line]
    assert [(*row[2:6], row[7]) for row in rows] == [
        ("7.50", "5.25", "shrunk", "yes", "yes"),
        ("-1.12", "5.25", "pooled", "no", "yes"),
        ("6.00", "5.25", "shrunk", "yes", "no"),
    ]


def test_measures_are_compared_in_percent(tmp_path: Path) -> None:
    for number, run in enumerate(RUNS):
        folder = run.folder(tmp_path)
        (folder / "checkpoints" / "step-00000004").mkdir(parents=True)
        (folder / "evaluations").mkdir()
        names = ("top1", "top5", "sa", "auprc", "precision_at_recall_0.9")
        measures = dict.fromkeys(names, 0.5 + number / 1000)
        (folder / "evaluations" / "step-00000004.json").write_text(json.dumps(measures))
    table, markdown = comparison(tmp_path)
    assert markdown.splitlines()[-1] == "| vtree x ce | 50.2% | 50.2% | 50.2% | 50.2% | 50.2% |"
    assert "│ dense x batch_ce     │ 50.1% │" in text_of(table)
