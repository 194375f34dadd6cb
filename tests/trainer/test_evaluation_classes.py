"""The per-class results of an evaluation as a table and as a CSV file, and the output of `kway
eval`.
"""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from data.shards.manifest import Manifest
from heads.slc import ClassMeasures
from trainer.evaluation import Evaluation, load_evaluation
from trainer.evaluation.__main__ import main as evaluate_on_a_rank
from trainer.evaluation.request import EvaluationRequest
from trainer.evaluation.saved import ClassTable, write_csv
from trainer.promises import make_promises

NAMES = ["red", 'with "quotes", and\nlines', "empty", "緑"]


def evaluation() -> Evaluation:
    classes = ClassMeasures(
        class_ids=torch.tensor([0, 1, 3]),
        positives=torch.tensor([4, 2, 2]),
        average_precision=torch.tensor([0.5, 0.9, 0.5], dtype=torch.float64),
        precision_at=torch.tensor([[1 / 3], [0.5], [1.0]], dtype=torch.float64),
        threshold=torch.tensor([[0.1], [-2.0], [3.5]]),
        recalls=(0.9,),
    )
    correct = torch.tensor([1, 2, 0])
    labels = np.repeat(np.arange(4), [4, 2, 0, 2])
    promises = make_promises(np.arange(8.0), labels, np.zeros(4, np.int64), (0.9,), 0.9)
    reached = torch.zeros(4, 1, 2, dtype=torch.int64)
    return Evaluation({}, classes, promises, reached, 8, correct, torch.empty(0, 3))


def test_every_class_has_a_csv_row_with_full_precision(tmp_path):
    table = ClassTable(evaluation(), NAMES)
    write_csv(table, tmp_path / "classes.csv")
    with (tmp_path / "classes.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == NAMES
    assert [row["class"] for row in rows] == ["0", "1", "2", "3"]
    assert float(rows[0]["accuracy"]) == 0.25
    assert float(rows[0]["precision_at_recall_0.9"]) == 1 / 3
    threshold = torch.tensor(float(rows[0]["threshold_at_recall_0.9"]), dtype=torch.float32)
    assert threshold == torch.tensor(0.1)
    assert [*rows[2].values()] == ["2", "empty", "0", "", "", "", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["classes.csv"]


@pytest.fixture(scope="module")
def run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(finished / "run", tmp_path_factory.mktemp("evaluated") / "run")


def test_two_processes_and_one_show_the_same_evaluation(
    kway, run, glyphs, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "80")
    expected = load_evaluation(run / "evaluations", step=4)
    table = tmp_path / "classes.csv"
    options = ["--confusions", 4, "--classes", table]
    assert kway("eval", run, "--nproc", 2, *options) == 0
    shown = capfd.readouterr().out
    tables = [line for line in shown.splitlines() if "/" not in line]  # paths are longer
    assert max(map(len, tables)) <= 80
    for title in ("most confused", "13 classes: "):
        assert title in shown
    found = load_evaluation(run / "evaluations", step=4)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-6)
    wrong = (1 - found.metrics["top1"]) * found.num_samples
    assert int(found.confusions[:, 2].sum()) == round(wrong)
    with table.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list(Manifest.load(glyphs).class_names)


def test_evaluating_another_split_does_not_replace_the_results_for_export(kway, run):
    before = {path: path.read_bytes() for path in (run / "evaluations").glob("step-*")}
    assert kway("eval", run, "--split", "train", "--set", "evaluation.topk=[2]") == 0
    assert {path: path.read_bytes() for path in before} == before
    (saved,) = (run / "evaluations" / "train,evaluation.topk=[2]").glob("*.json")
    assert "top2" in json.loads(saved.read_text(encoding="utf-8"))


def test_settings_that_change_the_result_get_a_separate_folder(run):
    def folder(*settings: str) -> str:
        return EvaluationRequest(run, settings=settings).folder().name

    assert folder() == "evaluations"
    assert folder("evaluation.batch=3", "data.workers=1") == "evaluations"
    assert folder("evaluation.recalls=[0.9, 0.99]", "data.image.crops=1") == "evaluations"
    assert folder("evaluation.recalls=[0.5]") == "test,evaluation.recalls=[0.5]"


def test_settings_that_are_too_long_for_a_folder_fail_before_the_evaluation(
    kway, run, capsys, monkeypatch
):
    monkeypatch.setattr("launch.commands.evaluate._evaluate", lambda *_: pytest.fail("evaluated"))
    recalls = [number / 100 for number in range(1, 60)]
    assert kway("eval", run, "--set", f"evaluation.recalls={recalls}") == 2
    assert "shorten a list" in capsys.readouterr().err


def test_running_out_of_memory_prints_a_one_line_error_with_a_suggestion(run, injected, capsys):
    """test_out_of_memory.py covers the errors of torch and NumPy."""

    def fail() -> None:
        raise MemoryError

    injected("pread", "test-000000.tar", fail)
    assert evaluate_on_a_rank([str(run)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: the machine ran out of memory in evaluation: ")
    assert errors.endswith("; try --set evaluation.batch=256\n")
    assert errors.count("\n") == 1


def test_settings_that_do_not_apply_to_evaluations_are_rejected(kway, run, capsys):
    with pytest.raises(ValueError, match=r"--set head\.memory_mib=3 does not apply to an eval"):
        EvaluationRequest(run, settings=("head.memory_mib=3",)).recipe()
    with pytest.raises(ValueError, match=r"evaluation\.topk"):
        EvaluationRequest(run, settings=("evaluation.topk=[0]",)).recipe()
    crops = EvaluationRequest(run, settings=("data.image.resize=20", "data.image.crops=5"))
    assert crops.folder().name == "test,data.image.crops=5,data.image.resize=20"
    for code in (
        kway("eval", run, "--split", "none"),
        evaluate_on_a_rank(["--split=none", "--", str(run)]),
    ):
        assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "error"]
