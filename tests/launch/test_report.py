"""`kway report`: its page for complete, running, damaged, empty and malicious runs."""

import fcntl
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from launch.measures import is_ratio, measure_label
from launch.report import read_runs, report_page
from launch.report.charts import _spread, in_percent, plain, smoothed
from launch.report.figures import SECTIONS, axis_of, latest_evaluation
from launch.report.numbers import format_duration, format_number, share_of_phases
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from trainer.train import train

HOSTILE = "\"><img src=x onerror=alert(1)></svg><script>alert('$x_1$')</script>\u202e\x1b"
_TAGS = """html head meta title style body main section div span p h1 h2 h3 ul li b wbr
table thead tbody tr th td figure figcaption details summary pre
svg g path defs use clippath rect text"""
TAGS = set(_TAGS.split())

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """A function that writes a run folder with steps 10, 20, ..., 100 and two evaluations."""

    def make(name: str = "run", *, batch: int = 32, **recipe: Any) -> Path:
        folder = tmp_path / name
        (folder / "evaluations").mkdir(parents=True)
        tree = {"run": name, "train": {"duration": {"steps": 100}}, **recipe}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
        records = [step_record(step, batch) for step in range(10, 101, 10)]
        for step in (50, 100):
            add_evaluation(folder, step, top1=step / 200, auprc=step / 400)
        write_records(folder, records)
        return folder

    return make


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
    tensors = {
        "positives": np.array([3, 0, 2]),
        "average_precision": np.array([0.75, np.nan, 0.25]),
        "precision_at": np.array([[0.5], [np.nan], [0.125]]),
        "recalls": np.array([0.9]),
    }
    save_file(tensors, path.with_suffix(".safetensors"))


def page_of(*folders: Path) -> str:
    return report_page(read_runs(folders), lambda done, total: None)


def cells(page: str, row: str) -> list[str]:
    """The cells of a table row."""
    page = page.replace("<wbr>", "")
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


# ------------------------------------------------------------------ valid runs


def test_the_page_shows_a_run_written_by_the_trainer(glyphs, tmp_path):
    recipe = glyph_recipe(glyphs, tmp_path / "tiny", evaluation__every={"steps": 2})
    train(recipe, rank_world())
    page = page_of(tmp_path / "tiny")
    found = [json.loads(path.read_text()) for path in (recipe.run / "evaluations").glob("*.json")]
    assert {evaluation["step"] for evaluation in found} == {2, 4}
    best = max(sorted(found, key=lambda e: e["step"]), key=lambda e: e["auprc"])
    assert cells(page, "state") == ["finished"]
    assert cells(page, "steps") == ["4"]
    assert cells(page, "best AUPRC") == [f"{best['auprc']:.1%} at step {best['step']}"]
    for title in ("Loss", "Learning rate", "Top-1 accuracy", "AUPRC per class", "Throughput"):
        assert f"<h3>{title}</h3>" in page, title
    assert 'class="problems"' not in page


def test_the_summary_has_a_column_per_run(make_run):
    page = page_of(make_run("one"), make_run("two", batch=64))
    assert cells(page, "last loss") == ["1", "1"]
    assert cells(page, "samples") == ["3,200", "6,400"]
    assert cells(page, "best top-1 accuracy") == ["50.0% at step 100", "50.0% at step 100"]
    assert cells(page, "throughput, median") == ["64 samples/s", "128 samples/s"]
    assert cells(page, "waiting for data, median") == ["25.0%", "25.0%"]
    assert cells(page, "training time") == ["50 s", "50 s"]
    assert cells(page, "wall time, first to last record") == ["1.5 min", "1.5 min"]


def test_recipe_differences_contain_only_keys_that_differ(make_run):
    one = make_run("one", seed=1, head={"loss": {"kind": "ce"}})
    two = make_run("two", seed=1, head={"loss": {"kind": "smooth_topk", "k": 5}})
    page = page_of(one, two)
    assert cells(page, "head.loss.kind") == ["ce", "smooth_topk"]
    assert cells(page, "head.loss.k") == ["–", "5"]
    assert '<th scope="row">seed</th>' not in page
    assert '<th scope="row">run</th>' not in page
    assert "seed: 1" in page  # in the complete recipe


def test_runs_with_different_batch_sizes_are_compared_by_samples(make_run):
    same, other = make_run("same"), make_run("other", batch=64)
    assert axis_of(read_runs([same])).label == "steps"
    runs = read_runs([same, other])
    axis = axis_of(runs)
    assert axis.label == "samples"
    assert [axis.of(run, np.array([10.0])).tolist() for run in runs] == [[320.0], [640.0]]


def test_phase_shares_sum_to_one_with_unattributed_time_as_other(make_run):
    folder, without = make_run("with"), make_run("without")
    phases = {"data": 1.0, "forward": 2.0, "evaluation": 5.0}  # 5 s per 10 steps
    write_records(folder, [step_record(step, phases=phases) for step in (10, 20)])
    (run,) = read_runs([folder])
    assert share_of_phases(run) == pytest.approx(
        {"data": 0.1, "forward": 0.2, "evaluation": 0.5, "other": 0.2}
    )
    page = page_of(folder, without)
    assert cells(page, "forward") == ["20.0%", "–"]
    assert "Not recorded: B" in page
    assert "<h3>Time by phase</h3>" not in page_of(without)


def test_checkpoints_restarts_and_damaged_checkpoints_are_marked(make_run):
    folder = make_run()
    refused = {"event": "refused", "step": 40, "checkpoint": "step-00000050: SHA-256 differs"}
    records = [step_record(step, restarts=int(step > 40)) for step in range(10, 101, 10)]
    checkpoint = {"event": "checkpoint", "step": 50, "folder": "x/step-00000050"}
    write_records(folder, [*records, checkpoint, refused])
    page = page_of(folder)
    assert "▲ checkpoint" in page
    assert "┆ restart" in page
    assert "✕ damaged checkpoint skipped" in page
    assert "SHA-256 differs" in page
    assert cells(page, "restarts") == ["1"]
    assert "┆" not in page_of(make_run("uninterrupted"))


def test_a_locked_run_is_reported_as_running(make_run):
    folder = make_run()
    write_records(folder, [step_record(10)])
    shutil.rmtree(folder / "evaluations")
    assert read_runs([folder])[0].state == "stopped at step 10 of 100"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_runs([folder])[0].state == "running at step 10"
    assert read_runs([folder])[0].state == "stopped at step 10 of 100"


# ------------------------------------------------------------------ the page


def test_the_page_has_no_scripts_and_no_external_resources(make_run):
    page = page_of(make_run("one"), make_run("two"))
    parsed = ParsedPage(page)
    assert parsed.tags <= TAGS
    names = {name for name, _ in parsed.attributes}
    assert not names & {"src", "srcset", "href", "action", "onload", "onclick"}
    links = [value for name, value in parsed.attributes if name == "xlink:href"]
    assert all(value and value.startswith("#") for value in links)
    assert "url(http" not in page
    assert "@import" not in page
    assert "default-src 'none'" in page


def test_every_plot_is_valid_svg_with_a_description_and_theme_colors(make_run):
    plots = re.findall(r"<svg.*?</svg>", page_of(make_run("one"), make_run("two")), re.DOTALL)
    assert len(plots) > 8
    for plot in plots:
        root = ElementTree.fromstring(plot)
        assert root.get("role") == "img"
        assert re.search(r"A.*\d", root.get("aria-label", ""))
        colors = set(re.findall(r"#[0-9a-f]{6}\b", plot)) - {"#000000", "#ffffff"}
        assert colors == set(), "colors that are the same in light and dark mode"
        assert "var(--run0)" in plot


def test_names_from_a_run_are_escaped_everywhere(make_run, tmp_path):
    folder = make_run(head={"loss": {"kind": HOSTILE}}, **{HOSTILE: 1})
    for step in (50, 100):
        add_evaluation(folder, step, **{HOSTILE: step / 100})
    phases = {HOSTILE: 1.0, "forward": 1.0}
    event = {"event": HOSTILE, "step": 5, HOSTILE: HOSTILE, "time": 1e300}
    write_records(folder, [*(step_record(s, phases=phases) for s in (10, 20)), event])
    hostile = folder.rename(tmp_path / HOSTILE.replace("/", "|"))
    page = page_of(hostile, make_run("other"))
    parsed = ParsedPage(page)
    assert parsed.tags <= TAGS
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "&lt;img src=x onerror" in page


# ------------------------------------------------------------------ invalid runs


def test_damaged_files_are_listed_and_the_others_are_shown(make_run):
    folder = make_run()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnull\n{"event": "step"}\n{"event": 3, "step": 1}\n' + "[" * 100_000 + "\n")
        file.write('{"event": "step", "step": 110, "loss": NaN, "samples": 1' + "0" * 400 + "}\n")
        file.write('{"event": "step", "step": 120, "lo')
    (folder / "evaluations" / "step-00000100.json").write_text("{")
    newest = folder / "evaluations" / "step-00000100.safetensors"
    newest.write_bytes(newest.read_bytes()[:-9])
    (folder / "recipe.yaml").write_text("a: [")
    page = page_of(folder)
    assert "metrics.jsonl: skipped 6 lines" in page
    assert "step-00000100.json is skipped" in page
    assert "step-00000100.safetensors is skipped" in page
    assert "the recipe cannot be shown: recipe.yaml is not YAML" in page
    assert cells(page, "best top-1 accuracy") == ["25.0% at step 50"]
    assert cells(page, "steps") == ["110"]
    assert cells(page, "last loss") == ["not finite"]
    assert "<h3>AUPRC per class</h3>" in page  # from the previous evaluation


def test_classes_without_samples_are_excluded_from_the_curves(make_run):
    (run,) = read_runs([make_run()])
    assert run.evaluations.classes is not None
    assert run.evaluations.classes.average_precision.tolist() == [0.75, 0.25]
    assert run.evaluations.classes.precision_at.tolist() == [[0.5], [0.125]]


def test_tensors_of_inconsistent_shapes_are_listed(make_run):
    folder = make_run()
    for path in (folder / "evaluations").glob("*.safetensors"):
        save_file({"positives": np.ones(3), "average_precision": np.ones(2)}, path)
    page = page_of(folder)
    assert "step-00000100.safetensors is skipped" in page
    assert "<h2>Single-class accuracy</h2>" not in page


def test_a_run_without_steps_is_shown_next_to_a_complete_one(make_run):
    empty = make_run("empty")
    (empty / "metrics.jsonl").unlink()
    shutil.rmtree(empty / "evaluations")
    page = page_of(make_run("complete"), empty)
    assert cells(page, "state") == ["finished", "no steps logged"]
    assert "no steps are logged" in page
    assert "no steps are logged" in page_of(empty)


def test_nested_yaml_aliases_are_not_expanded(make_run):
    folder = make_run()
    layers = ["a0: &a0 {x: 1, y: 2}"]
    layers += [f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 40)]
    (folder / "recipe.yaml").write_text("\n".join(layers))
    assert "more than 5,000 keys" in page_of(folder)


def test_invalid_run_folders_raise_errors(make_run, tmp_path):
    run = make_run()
    with pytest.raises(ValueError, match="is not a run"):
        read_runs([run, tmp_path])
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="is passed twice"):
        read_runs([run, tmp_path / "." / run.name])


# ------------------------------------------------------------------ components


def test_labels_of_curves_that_end_at_similar_values_do_not_overlap():
    ends = np.array([[1.0, 0.98], [1.0, 0.97], [1.0, 0.1], [1.01, 0.97], [0.5, 0.98]])
    heights = _spread(ends)
    assert (np.diff(np.sort(heights[:4])) >= 0.0649).all()
    assert heights.max() <= 1
    assert heights[2] == pytest.approx(0.1)
    assert heights[4] == pytest.approx(0.98)


def test_smoothing_preserves_straight_lines_and_reduces_noise():
    line = np.linspace(3, 5, 40)
    assert smoothed(line) == pytest.approx(line)
    noise = np.random.default_rng(0).standard_normal(400)
    assert smoothed(noise).std() < noise.std() / 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.83124, "0.8312"), (1250, "1,250"), (3.1e-5, "3.10e-05"), (np.nan, "not finite"), (0, "0")],
)
def test_numbers_have_four_significant_digits(value, text):
    assert format_number(value) == text


def test_durations_have_a_suitable_unit():
    assert [format_duration(s) for s in (45, 600, 7200, 1e6)] == [
        "45 s",
        "10 min",
        "2 h",
        "11.6 days",
    ]


def test_ticks_are_plain_numbers_or_percentages():
    ticks = [plain(value) for value in (0, 0.05, 2500, 1.5e6, -3)]
    assert ticks == ["0", "0.05", "2,500", "1.5M", "-3"]
    assert [in_percent(ratio) for ratio in (0, 0.025, 1)] == ["0%", "2.5%", "100%"]


def test_metrics_are_shown_with_names_and_units():
    names = ("top5", "marginal_top1", "sa", "auprc", "precision_at_recall_0.9", "loss")
    assert [measure_label(name) for name in names] == [
        "top-5 accuracy",
        "marginalized top-1 accuracy",
        "similarity accuracy (SA)",
        "AUPRC",
        "precision at recall 0.9",
        "loss",
    ]
    assert [is_ratio(name) for name in names] == [True] * 5 + [False]


def test_bars_of_measures_are_labeled(make_run):
    folder = make_run()
    add_evaluation(folder, 100, top1=0.5, auprc=0.25, loss=3.5)
    (plot,) = latest_evaluation(read_runs([folder]))
    (axes,) = plot.figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["top-1 accuracy", "AUPRC"]
    assert [text.get_text() for text in axes.texts] == ["A 50.0%", "A 25.0%"]
    assert plot.alt_text == "top-1 accuracy: A 50.0%; AUPRC: A 25.0%"
    assert plot.note == "Evaluated at step 100."


def test_the_page_of_a_long_run_is_small(make_run):
    folder = make_run()
    rng = np.random.default_rng(0)
    records = [step_record(s, gradient_norm=float(rng.random())) for s in range(1, 20_000)]
    write_records(folder, records)
    assert len(page_of(folder)) < 400_000


def test_every_section_has_plots_for_a_complete_run(make_run):
    runs = read_runs([make_run()])
    for title, plots in SECTIONS.items():
        assert list(plots(runs)), title


# ------------------------------------------------------------------ the command


def test_the_command_writes_the_page_and_lists_problems(kway, make_run, tmp_path, capsys):
    folder = make_run("my run")
    (folder / "metrics.jsonl").write_text("?\n")
    out = tmp_path / "pages.html"
    out.write_text("an older page")
    assert kway("report", folder, "-o", out) == 0
    output = capsys.readouterr().out
    assert "A my run: metrics.jsonl: skipped 1 line" in output
    assert f"{out}: 1 run, " in output
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert out.read_text().rstrip().endswith("</html>")


def test_the_command_rejects_a_folder_that_is_not_a_run_and_keeps_the_old_page(
    kway, tmp_path, capsys
):
    out = tmp_path / "page.html"
    out.write_text("an older page")
    assert kway("report", tmp_path, "-o", out) == 2
    assert "is not a run" in capsys.readouterr().err
    assert out.read_text() == "an older page"
    assert kway("report", tmp_path, "-o", tmp_path) == 2
