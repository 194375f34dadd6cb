"""Telemetry: one set of numbers in the JSONL, at the endpoint and on the screen."""

import fcntl
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.ranks import rank_world
from tests.shards import glyph_recipe
from tests.system.processes import ROOT, environment, write_recipe
from trainer.config import TelemetryConfig
from trainer.telemetry import Telemetry
from trainer.train import train
from trainer.world import World

NUMBERS = {"loss": 1.25, "learning_rate": 0.05, "gradient_norm": 3.5, "bad_samples": 2}
NUM_STEPS = 100
COLUMNS = 80


def telemetry(folder: Path, *, start_step: int = 0, rank: int = 0, **settings: Any) -> Telemetry:
    world = World(rank, 2, rank, torch.device("cpu"), None)
    return Telemetry(
        folder,
        TelemetryConfig(**settings),
        world,
        start_step=start_step,
        num_steps=NUM_STEPS,
        global_batch=12,
    )


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scraped(url: str) -> dict[str, float]:
    """Name (with labels, if any) -> value, as Prometheus reads the page."""
    page = httpx.get(url).raise_for_status().text
    return {
        sample.name + "".join(f"/{label}" for label in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_the_endpoint_says_what_the_jsonl_says(tmp_path):
    with telemetry(tmp_path, start_step=20, port=0) as report:
        report.waited(1e-6)
        report.step(21, **{**NUMBERS, "loss": 9.0})
        report.waited(1e-6)
        report.step(30, **NUMBERS)
        report.event("checkpoint", 30, "checkpoint", folder="x")
        report.event("evaluation", 30, "evaluation", top1=0.5, sa=0.25)
        page = scraped(report.metrics.url)
    _, step, _, evaluation = records(tmp_path)
    assert step["step"] * 12 == step["samples"] == 360
    assert step["step_seconds"] * step["samples_per_second"] == pytest.approx(12)
    assert step["data_wait_ratio"] == pytest.approx(1e-6 / (9 * step["step_seconds"]))
    assert page.pop("kway_train_last_step_timestamp_seconds") == pytest.approx(step["time"], abs=1)
    assert page == {
        "kway_train_steps_total": 30,
        "kway_train_samples_total": 360,
        "kway_train_checkpoints_total": 1,
        "kway_train_loss": step["loss"],
        "kway_train_learning_rate": step["learning_rate"],
        "kway_train_gradient_norm": step["gradient_norm"],
        "kway_train_bad_samples": step["bad_samples"],
        "kway_train_step_seconds": step["step_seconds"],
        "kway_train_data_wait_ratio": step["data_wait_ratio"],
        "kway_train_evaluation/top1": evaluation["top1"],
        "kway_train_evaluation/sa": evaluation["sa"],
    }


def test_the_endpoint_is_gone_when_the_run_is(tmp_path):
    with telemetry(tmp_path, port=0) as report:
        url = report.metrics.url
        scraped(url)
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_nothing_listens_where_no_port_is_asked_for(tmp_path, capsys):
    before = threading.active_count()
    with telemetry(tmp_path) as report:
        assert report.metrics.url is None
        assert threading.active_count() == before
    assert capsys.readouterr().out == ""


def test_a_port_in_use_is_one_line_and_leaves_all_as_it_was(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wanted = rf"^telemetry\.port {port} on 127\.0\.0\.1 cannot be used \(.*in use\): choose an"
        with pytest.raises(OSError, match=wanted) as caught, telemetry(tmp_path, port=port):
            pass
    assert "\n" not in str(caught.value)
    assert records(tmp_path) == [{"step": 7}]
    assert capsys.readouterr().out == ""


def test_other_ranks_write_nothing_and_listen_nowhere(tmp_path, capsys):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        telemetry(tmp_path, rank=1, port=taken.getsockname()[1]) as report,
    ):
        report.say("hello")
        report.waited(1.0)
        with report.pause():
            report.step(1, **NUMBERS)
        report.event("checkpoint", 1, "checkpoint")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_the_first_the_last_and_every_nth_step_are_due(tmp_path):
    report = telemetry(tmp_path, log_every=30)
    due = [step for step in range(1, NUM_STEPS + 1) if report.is_due(step)]
    assert due == [1, 30, 60, 90, NUM_STEPS]


@pytest.mark.parametrize(
    "last", ['{"event": "st', '{"event": "step", "step": 4', '{"event": "step", "step": 4}', "{}\n"]
)
def test_a_cut_last_line_neither_stays_nor_joins_the_next(last, tmp_path):
    whole = '{"event": "step", "step": 3}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + last)
    with telemetry(tmp_path, start_step=4) as report:
        report.step(5, **NUMBERS)
    assert [record["step"] for record in records(tmp_path)] in ([3, 5], [3, 4, 5])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resumed_run_drops_the_lines_after_its_checkpoint(glyphs, tmp_path):
    changes = {"telemetry": {"log_every": 1}, "checkpoint": {"every": {"steps": 4}}}
    train(glyph_recipe(glyphs, tmp_path, **changes), rank_world())
    with (tmp_path / "metrics.jsonl").open("a") as file:  # what a killed run may leave
        file.write('{"event": "step", "step": 5, "loss": 1e9}\n{"event": "step", "step": 6, "lo')
    train(glyph_recipe(glyphs, tmp_path, **changes, train__duration={"steps": 6}), rank_world())
    lines = records(tmp_path)
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [4, 6]
    assert all(line.get("loss", 0) < 100 for line in lines)


def test_off_a_terminal_there_are_plain_whole_lines(tmp_path, capsys, monkeypatch):
    """FORCE_COLOR, common in CI, makes rich believe in a terminal; a log stays a log."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = "[bold]not markup[/bold] :smile: " + 60 * "word "
    with telemetry(tmp_path) as report:
        report.step(1, **NUMBERS)
        report.say(long)
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        rf"step 1/{NUM_STEPS}  loss 1\.2500  lr 5\.00e-02  \d+ samples/s  data wait 0%", first
    )
    assert second.rstrip() == long.rstrip()


def shown_on_a_terminal(command: list[str]) -> tuple[int, str]:
    """Exit code and all that a terminal of COLUMNS x 40 was sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    variables = environment() | {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    variables.pop("COLUMNS", None)
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=variables
    )
    os.close(theirs)
    sent = b""
    try:
        while chunk := os.read(ours, 65536):
            sent += chunk
    except OSError:  # Linux: the last process has closed its end
        pass
    finally:
        os.close(ours)
    return process.wait(60), sent.decode()


def test_on_a_terminal_a_bar_that_fits_stands_below_whole_lines(glyphs, tmp_path):
    recipe = glyph_recipe(
        glyphs,
        tmp_path / "run",
        train__duration={"steps": 12},
        checkpoint__every={"steps": 6},
        telemetry={"log_every": 3},
    )
    command = [sys.executable, "-m", "trainer", str(write_recipe(tmp_path, recipe))]
    code, sent = shown_on_a_terminal(command)
    assert code == 0, sent
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
    bars = [line.strip() for line in re.split(r"[\r\n]+", shown) if "━" in line]
    assert any(line.startswith("step  0/12") for line in bars), shown
    assert re.fullmatch(
        r"step 12/12 ━+ 0:00:\d\d loss \d\.\d{4}  \d+ samples/s  data wait \d+%", bars[-1]
    )
    assert max(len(line) for line in bars) <= COLUMNS
    assert "…" not in shown
    checkpoints = tmp_path / "run" / "checkpoints"
    # A long path may stand in a line of its own, never in two.
    lines = [line.removeprefix("checkpoint ") for line in shown.splitlines()]
    assert [line for line in lines if "step-0" in line] == [
        str(checkpoints / name) for name in ("step-00000006", "step-00000012")
    ]
    # A rank that is killed could not show the cursor again.
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l")
    assert sent.index("\x1b[?25h") < sent.index("━")
