"""Telemetry writes the same numbers to the JSONL file and to the endpoints."""

import json
import math
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.file_errors import error
from tests.ranks import rank_world
from tests.shards import glyph_recipe
from tests.system.runs import read_lines
from tests.trainer.telemetry_reports import (
    CHECKPOINT_EVERY,
    CPU,
    GLOBAL_BATCH,
    NUM_STEPS,
    NUMBERS,
    records,
    scraped,
    telemetry,
)
from trainer.run.folder import RunFolder
from trainer.telemetry.jsonl import JsonLines
from trainer.telemetry.phases import PHASES, Phases
from trainer.train import train


def test_lines_are_buffered_while_the_disk_is_full_and_written_in_order(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = JsonLines(path)
    assert lines.write({"step": 1})
    size = path.stat().st_size
    try:
        # With this limit, as on a full disk, only part of a line can be written.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
        assert not lines.write({"step": 2})
        assert not lines.write({"step": 3})
        assert path.stat().st_size == size + 10
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert lines.write({"step": 4})
    lines.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 4]


def test_lines_that_cannot_be_written_raise_an_error_at_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = JsonLines(path)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        assert not lines.write({"step": 1})
        with pytest.raises(OSError, match=r"metrics.jsonl cannot be written .*free up space"):
            lines.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_transient_errors_of_a_runs_files_do_not_end_it_or_change_them(glyphs, tmp_path, injected):
    """Part of a failed write is in the file."""
    run, failed = tmp_path / "run", Counter[str]()
    logs = [
        run / name for name in ("metrics.jsonl", "samples-rank0.jsonl", "nonfinite-rank0.jsonl")
    ]

    def fault(call: str, path: Path) -> Callable[[], None]:
        def fail() -> None:
            failed[f"{call} {path.name}"] += 1
            if call == "pwrite":
                with path.open("ab") as file:
                    file.write(b'{"step": 3, "sam')
            if failed[f"{call} {path.name}"] < 4:
                error("EIO")()

        return fail

    for call, path in [*product(("open", "pwrite"), logs), ("fsync", run / "recipe.yaml")]:
        injected(call, str(path), fault(call, path), times=3)
    recipe = glyph_recipe(
        glyphs,
        run,
        telemetry={"log_every": 1, "sample_ids": True},
        optimizer={"kind": "sgd", "lr": 1e30},
        train__max_skipped_steps=9,
    )
    with pytest.raises(ValueError, match="NaN"):  # the evaluation after the last step
        train(recipe, rank_world())
    assert set(failed.values()) == {3}
    assert len(failed) == 7
    assert RunFolder(run).load_recipe().run == run
    metrics, samples, skipped = ([record["step"] for record in read_lines(path)] for path in logs)
    assert samples == [1, 2, 3, 4]
    assert sorted({*metrics}) == [0, *samples]
    assert 0 < len(skipped) == len({*skipped})


def test_the_endpoint_and_the_jsonl_file_contain_the_same_numbers(tmp_path):
    phases = Phases(CPU)
    with telemetry(tmp_path, start_step=20, phases=phases, port=0) as report:
        for step in range(21, 31):
            for name in PHASES:
                with phases(name):
                    pass
            report.beat(step, busy_seconds=[1.0, step / 10])
        report.step(30, **NUMBERS)
        report.event("checkpoint", 30, f"checkpoint {tmp_path / 'step-00000030'}")
        report.event("evaluation", 30, "evaluation", top1=0.5, sa=0.25)
        page = scraped(report)
    step, checkpoint, evaluation = records(tmp_path)
    assert step["step"] * GLOBAL_BATCH == step["samples"] == 360
    assert step["step_seconds"] * step["samples_per_second"] == pytest.approx(GLOBAL_BATCH)
    elapsed = 10 * step["step_seconds"]
    assert step["data_wait_ratio"] == pytest.approx(step["phases"]["data"] / elapsed)
    assert step["slowest_rank"] == 1
    assert step["busy_seconds"] == {"slowest": pytest.approx(2.55), "median": pytest.approx(1.775)}
    assert checkpoint["step"] == 30
    written = {
        "kway_train_last_step_timestamp_seconds": step["time"],
        "kway_train_last_checkpoint_timestamp_seconds": checkpoint["time"],
        "kway_train_start_timestamp_seconds": step["time"],
    }
    for name, value in written.items():
        assert page.pop(name) == pytest.approx(value, abs=1)
    assert page.pop(next(name for name in page if "rank_info" in name)) == 1
    assert page == {
        "kway_train_step": 30,
        "kway_train_planned_steps": NUM_STEPS,
        "kway_train_checkpoint_every_steps": CHECKPOINT_EVERY,
        # Counted from step 20, where this process started.
        "kway_train_steps_total": 10,
        "kway_train_samples_total": 10 * GLOBAL_BATCH,
        "kway_train_checkpoints_total": 1,
        "kway_train_lost_checkpoints_total": 0,
        "kway_train_loss": step["loss"],
        "kway_train_learning_rate": step["learning_rate"],
        "kway_train_gradient_norm": step["gradient_norm"],
        "kway_train_bad_samples": step["bad_samples"],
        "kway_train_skipped_steps": step["skipped_steps"],
        "kway_train_restarts": step["restarts"],
        "kway_train_step_seconds": step["step_seconds"],
        "kway_train_samples_per_second": step["samples_per_second"],
        "kway_train_data_wait_ratio": step["data_wait_ratio"],
        "kway_train_memory_bytes/resident": step["memory"]["resident"],
        "kway_train_rank_busy_seconds/0": 1.0,
        "kway_train_rank_busy_seconds/1": pytest.approx(2.55),
        "kway_train_evaluation/top1": evaluation["top1"],
        "kway_train_evaluation/sa": evaluation["sa"],
    } | {
        f"kway_train_phase_seconds_total/{name}": pytest.approx(step["phases"][name])
        for name in PHASES
    } | {f"kway_train_phase/{name}": 0 for name in PHASES}


def test_the_phase_of_a_rank_is_read_at_each_scrape(tmp_path):
    phases = Phases(CPU)
    with telemetry(tmp_path, phases=phases, port=0) as report:
        with phases("evaluation"), phases("communication"):  # part of the evaluation
            page = scraped(report)
        later = scraped(report)
    shown = {name: value for name, value in page.items() if name.startswith("kway_train_phase/")}
    assert shown == {f"kway_train_phase/{name}": float(name == "evaluation") for name in PHASES}
    assert later["kway_train_phase/evaluation"] == 0


def test_each_rank_has_an_endpoint_and_only_rank_0_has_other_outputs(tmp_path, capsys):
    with telemetry(tmp_path, rank=1, port=0) as report:
        assert report.endpoint is not None
        report.print_line("hello")
        report.beat(1, busy_seconds=[1.0, 2.0])
        report.step(1, **NUMBERS)
        report.event("checkpoint", 1, f"checkpoint {tmp_path / 'step-00000001'}")
        report.event("evaluation", 1, "evaluation", top1=0.5)
        page = scraped(report)
        port = report.endpoint.port
    assert page["kway_train_loss"] == NUMBERS["loss"]
    assert page["kway_train_step"] == 1
    assert not any("rank_busy" in name for name in page)
    assert any(name.startswith("kway_train_rank_info/") and "/1/1" in name for name in page)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == f"metrics of rank 1 at http://127.0.0.1:{port}/metrics\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use_raises_a_one_line_error_and_changes_no_files(rank, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    of_rank = r" \(local rank 1\)" if rank else ""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = rf"^telemetry\.port {port}{of_rank} on .* cannot be used \(.*in use\)"
        with pytest.raises(OSError, match=message) as caught:
            telemetry(tmp_path, rank=rank, port=port - rank)
    assert "\n" not in str(caught.value)
    assert records(tmp_path) == [{"step": 7}]
    assert capsys.readouterr().out == ""


def test_non_finite_numbers_are_written_as_null(tmp_path):
    def reject(constant: str) -> None:
        raise AssertionError(constant)

    with telemetry(tmp_path) as report:
        report.step(1, **{**NUMBERS, "loss": math.nan, "gradient_norm": math.inf})
        report.event("evaluation", 1, "evaluation", top1=-math.inf, classes=[math.nan, 1.0])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    step, evaluation = (json.loads(line, parse_constant=reject) for line in lines)
    assert step["loss"] is step["gradient_norm"] is evaluation["top1"] is None
    assert evaluation["classes"] == [None, 1.0]


def test_evaluations_and_checkpoints_are_not_counted_as_part_of_a_step(tmp_path):
    phases = Phases(CPU)
    with telemetry(tmp_path, phases=phases) as report:
        for name in ("evaluation", "checkpoint"):
            with phases(name), phases("communication"):
                time.sleep(0.2)
        report.step(1, **NUMBERS)
        remaining = report._pace.remaining_seconds()
    (step,) = records(tmp_path)
    assert step["phases"].keys() == {"evaluation", "checkpoint"}
    # The remaining steps will include such pauses too.
    assert remaining >= (NUM_STEPS - 1) * (step["step_seconds"] + 0.4)


@pytest.mark.parametrize(
    "last",
    [
        '{"event": "st',
        '{"event": "step", "step": 4',
        '{"event": "step", "step": 4}',
        "{}\n",
        '{"event": "step", "step": 5, "loss": 1e9}\n{"event": "checkpoint", "step": 6}\n',
    ],
)
def test_a_resumed_run_drops_incomplete_lines_and_those_after_its_checkpoint(last, tmp_path):
    complete = '{"event": "step", "step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(complete + last)
    with telemetry(tmp_path, start_step=4, log_every=5) as report:
        report.step(5, **NUMBERS)
    assert [record["step"] for record in records(tmp_path)] in ([3, 5], [3, 4, 5])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
