"""TensorBoard events contain the same numbers as the JSONL file, and each step only once."""

from pathlib import Path

import pytest

from tests.trainer.telemetry_reports import NUMBERS, records, telemetry

events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def write(folder: Path, *, start_step: int, last_step: int, loss: float) -> None:
    with telemetry(folder, start_step=start_step, tensorboard=True) as report:
        for step in range(start_step + 1, last_step + 1):
            report.step(step, **{**NUMBERS, "loss": loss})
        report.event("evaluation", last_step, "evaluation", top1=loss / 100)


def written_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = events.EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def test_scalars_equal_the_numbers_of_the_jsonl_file(tmp_path):
    write(tmp_path, start_step=0, last_step=2, loss=7.0)
    scalars = written_scalars(tmp_path)
    first, second, _ = records(tmp_path)
    for name in ("loss", "learning_rate", "gradient_norm", "samples_per_second", "skipped_steps"):
        expected = [(1, pytest.approx(first[name])), (2, pytest.approx(second[name]))]
        assert scalars[name] == expected
    assert scalars["memory/resident"][1] == (2, pytest.approx(second["memory"]["resident"]))
    assert scalars["evaluation/top1"] == [(2, pytest.approx(0.07))]


def test_a_resumed_run_writes_each_step_once(tmp_path):
    write(tmp_path, start_step=0, last_step=6, loss=7.0)
    write(tmp_path, start_step=4, last_step=7, loss=8.0)
    scalars = written_scalars(tmp_path)
    assert scalars["loss"] == [(step, 7.0 if step <= 4 else 8.0) for step in range(1, 8)]
    assert [step for step, _ in scalars["evaluation/top1"]] == [7]
