"""`kway report`: its page for complete, running, damaged and empty runs."""

import json
import re
from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from launch.report.page import axis_of, report_page, share_of_phases, summary
from launch.report.reading import read_runs
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from trainer.run.folder import RunFolder
from trainer.train import train

HOSTILE = "\"><img src=x onerror=alert(1)></svg><script>alert('$x_1$')</script>\u202e\x1b"

MakeRun = Callable[..., Path]


def write_run(above: Path, name: str = "run", *, batch: int = 32, **recipe: Any) -> Path:
    """Write a run folder with steps 10, 20, ..., 100 and two evaluations."""
    folder = above / name
    (folder / "evaluations").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"run": name, **recipe}))
    write_records(folder, [step_record(step, batch) for step in range(10, 101, 10)])
    for step in (50, 100):
        add_evaluation(folder, step, top1=step / 200, auprc=step / 400)
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    return partial(write_run, tmp_path)


@pytest.fixture(scope="module")
def page_of_two(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of two runs with different batch sizes and losses."""
    above = tmp_path_factory.mktemp("runs")
    one = write_run(above, "one", seed=1, head={"loss": {"kind": "ce"}})
    topk = {"loss": {"kind": "smooth_topk", "k": 5}}
    return page_of(one, write_run(above, "two", batch=64, seed=1, head=topk))


def step_record(step: int, batch: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "time": 1.7e9 + step,
        "event": "step",
        "step": step,
        "samples": step * batch,
        "loss": 100 / step,
        "learning_rate": 0.1,
        "gradient_norm": 1.5,
        "step_seconds": 0.5,
        "samples_per_second": 2.0 * batch,
        "data_wait_ratio": 0.25,
        **more,
    }


def write_records(folder: Path, records: list[dict[str, Any]]) -> None:
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)


def add_evaluation(folder: Path, step: int, **measures: float) -> None:
    path = folder / "evaluations" / f"step-{step:08d}.json"
    path.write_text(json.dumps({"step": step, "samples": 9, **measures}))


def page_of(*folders: Path) -> str:
    return report_page(read_runs(folders))


def cells(page: str, row: str) -> list[str]:
    """The cells of a table row."""
    found = re.search(rf'<tr><th scope="row">{re.escape(row)}</th>(.*?)</tr>', page)
    assert found, f"no row {row}"
    return re.findall(r"<td>(.*?)</td>", found[1])


class ParsedPage(HTMLParser):
    """The tags and attributes of a page, as a browser parses them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs


def test_the_page_shows_a_run_written_by_the_trainer(glyphs, tmp_path):
    recipe = glyph_recipe(glyphs, tmp_path / "tiny", evaluation__every={"steps": 2})
    train(recipe, rank_world())
    page = page_of(tmp_path / "tiny")
    found = [json.loads(path.read_text()) for path in (recipe.run / "evaluations").glob("*.json")]
    assert {evaluation["step"] for evaluation in found} == {2, 4}
    best = max(sorted(found, key=lambda e: e["step"]), key=lambda e: e["auprc"])
    assert cells(page, "steps") == ["4"]
    assert cells(page, "best AUPRC") == [f"{best['auprc']:.1%} at step {best['step']}"]
    for title in ("Loss", "Top-1 accuracy", "AUPRC per class", "Throughput", "Time by phase"):
        assert f"<h3>{title}</h3>" in page, title
    (run,) = read_runs([tmp_path / "tiny"])
    assert run.classes is not None
    worst = run.classes.worst(1)[0]
    name = run.classes.names[worst]
    assert cells(page, name)[2] == f"{run.classes.average_precision[worst]:.1%}"
    assert '<ul class="problems"></ul>' in page


def test_the_summary_has_a_column_per_run(page_of_two):
    page = page_of_two
    assert cells(page, "last loss") == ["1", "1"]
    assert cells(page, "samples") == ["3,200", "6,400"]
    assert cells(page, "best top-1 accuracy") == ["50.0% at step 100", "50.0% at step 100"]
    assert cells(page, "throughput, median") == ["64/s", "128/s"]
    assert cells(page, "waiting for data, median") == ["25.0%", "25.0%"]
    assert cells(page, "training time") == ["0:00:50", "0:00:50"]


def test_recipe_differences_contain_only_keys_that_differ(page_of_two):
    page = page_of_two
    assert cells(page, "head.loss.kind") == ["ce", "smooth_topk"]
    assert cells(page, "head.loss.k") == ["–", "5"]
    assert '<th scope="row">seed</th>' not in page
    assert '<th scope="row">run</th>' not in page


def test_runs_with_different_batch_sizes_are_compared_by_samples(make_run):
    same, other = make_run("same"), make_run("other", batch=64)
    assert axis_of(read_runs([same]))[0] == "steps"
    label, scale = axis_of(read_runs([same, other]))
    assert (label, list(scale.values())) == ("samples", [32, 64])


def test_phase_shares_sum_to_one_with_unattributed_time_as_other(make_run):
    folder = make_run()
    phases = {"data": 1.0, "forward": 2.0, "evaluation": 5.0}  # 5 s per 10 steps
    write_records(folder, [step_record(step, phases=phases) for step in (10, 20)])
    (run,) = read_runs([folder])
    assert share_of_phases(run) == pytest.approx(
        {"data": 0.1, "forward": 0.2, "evaluation": 0.5, "other": 0.2}
    )
    assert "<h3>Time by phase</h3>" not in page_of(make_run("without"))


def test_a_locked_run_is_reported_as_running(make_run):
    folder = make_run()
    with RunFolder(folder).locked():
        assert summary(read_runs([folder]))["state"] == ["running"]
    assert summary(read_runs([folder]))["state"] == ["not running"]


def test_the_page_has_no_scripts_and_no_external_resources(page_of_two):
    parsed = ParsedPage(page_of_two)
    names = {name for name, _ in parsed.attributes}
    assert not {"script", "link", "img", "iframe"} & parsed.tags
    assert not names & {"src", "srcset", "href", "action", "onload", "onclick"}
    links = [value for name, value in parsed.attributes if name == "xlink:href"]
    assert all(value and value.startswith("#") for value in links)
    assert "default-src 'none'" in page_of_two


def test_names_from_a_run_are_escaped_everywhere(make_run, tmp_path):
    folder = make_run(head={"loss": {"kind": HOSTILE}}, **{HOSTILE: 1})
    add_evaluation(folder, 100, **{HOSTILE: 0.5})
    hostile = folder.rename(tmp_path / HOSTILE.replace("/", "|"))
    page = page_of(hostile, make_run("other"))
    assert not {"script", "img"} & ParsedPage(page).tags
    assert "\u202e" not in page
    assert "&lt;img src=x onerror" in page


def test_damaged_files_are_listed_and_the_others_are_shown(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnull\n{"event": "step"}\n' + "[" * 100_000 + "\n")
        file.write('{"event": "step", "step": 110, "loss": NaN}\n{"event": "step", "lo')
    (folder / "evaluations" / "step-00000100.json").write_text("{")
    (folder / "evaluations" / "step-00000050.safetensors").write_bytes(b"?")
    (folder / "recipe.yaml").write_text("a: [")
    page = page_of(folder)
    for problem in (
        "metrics.jsonl: skipped 5 lines",
        "step-00000100.json is skipped",
        "step-00000050.safetensors is damaged",
        "recipe.yaml cannot be read",
    ):
        assert problem in page
    assert cells(page, "best top-1 accuracy") == ["25.0% at step 50"]
    assert cells(page, "steps") == ["110"]


def test_a_run_without_steps_is_shown_next_to_a_complete_one(make_run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "recipe.yaml").write_text("seed: 1")
    page = page_of(make_run("complete"), empty)
    assert cells(page, "steps") == ["100", "–"]
    assert "no steps are logged" in page


def test_folders_that_are_not_runs_raise_errors(tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        read_runs([tmp_path])
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        read_runs([tmp_path / "nowhere"])


def test_the_page_of_a_long_run_is_small(make_run):
    folder = make_run()
    rng = np.random.default_rng(0)
    records = [step_record(s, gradient_norm=float(rng.random())) for s in range(1, 20_000)]
    write_records(folder, records)
    assert len(page_of(folder)) < 400_000


def test_the_command_writes_the_page_and_lists_problems(kway, make_run, tmp_path, capsys):
    folder = make_run("my run")
    (folder / "metrics.jsonl").write_text("?\n")
    out = tmp_path / "pages.html"
    assert kway("report", folder, "-o", out) == 0
    assert "my run: metrics.jsonl: skipped 1 line" in capsys.readouterr().out
    assert out.read_text().rstrip().endswith("</html>")
    assert kway("report", folder / "evaluations", "-o", out) == 2  # and keeps the old page
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert kway("report", folder, "-o", tmp_path) == 2
