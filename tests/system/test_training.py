"""Whole training runs as processes: launchers agree, and a killed run resumes bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data import open_split
from data.sources import Glyphs
from data.writing.writer import write_shards
from tests.shards import glyph_recipe
from tests.system.processes import KWAY, ROOT, TORCHRUN, environment, kway, run, write_recipe
from trainer.__main__ import main


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(run_folder: Path) -> dict[int, float]:
    """Step -> loss, from the run's JSONL; a step that stands twice is an error."""
    records = read_lines(run_folder / "metrics.jsonl")
    pairs = [(r["step"], r["loss"]) for r in records if r["event"] == "step"]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def final_tensors(run_folder: Path) -> dict[str, torch.Tensor]:
    folder = max((run_folder / "checkpoints").glob("step-*"))
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    return tensors


def samples_by_step(run_folder: Path) -> dict[int, list[int]]:
    """Step -> sample ids of all ranks."""
    steps: dict[int, list[int]] = {}
    for path in run_folder.glob("samples-rank*.jsonl"):
        lines = read_lines(path)
        assert len({line["step"] for line in lines}) == len(lines)
        for line in lines:
            steps.setdefault(line["step"], []).extend(line["samples"])
    return steps


def test_torchrun_and_kway_train_do_the_same_thing(glyphs, tmp_path):
    recipe = glyph_recipe(glyphs, tmp_path / "a", telemetry__log_every=1)
    path = write_recipe(tmp_path, recipe)
    by_torchrun = run([*TORCHRUN, "2", "-m", "trainer", str(path)])
    by_kway = kway("train", path, f"run={tmp_path / 'b'}", "--nproc", "2")
    assert (by_torchrun.returncode, by_kway.returncode) == (0, 0), by_kway.stderr
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert len(losses(tmp_path / "a")) == 4


def start(recipe: Path, run_folder: Path, num: int = 2) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*KWAY, "train", str(recipe), f"run={run_folder}", "--nproc", str(num)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_for_step(run_folder: Path, step: int, process: "subprocess.Popen[Any]") -> None:
    path, deadline = run_folder / "metrics.jsonl", time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be killed"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not reached")


def test_a_run_killed_at_random_steps_ends_with_the_same_bits(glyphs, tmp_path):
    """SIGKILL of the launcher takes its ranks along; every sample is used once an epoch."""
    num_samples = len(open_split(glyphs, "train"))
    num_steps, batch = 60, 12
    recipe = write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs,
            tmp_path / "unused",
            head__weights__kind="vtree",
            head__loss__kind="batch_ce",
            train__duration={"steps": num_steps},
            checkpoint={"every": {"steps": 5}},
            telemetry={"log_every": 1, "sample_ids": True},
        ),
    )
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    assert start(recipe, undisturbed).wait(120) == 0
    seed = random.randrange(1 << 30)
    print(f"kill steps are drawn with seed {seed}")  # shown where the test fails
    for step in sorted(random.Random(seed).sample(range(2, num_steps - 8), 2)):
        process = start(recipe, disturbed)
        wait_for_step(disturbed, step, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert start(recipe, disturbed).wait(120) == 0

    assert losses(disturbed) == losses(undisturbed)
    expected, got = final_tensors(undisturbed), final_tensors(disturbed)
    assert expected.keys() == got.keys()
    assert all(torch.equal(tensor, got[name]) for name, tensor in expected.items())
    steps = samples_by_step(disturbed)
    assert sorted(steps) == list(range(1, num_steps + 1))
    stream = [sample for step in sorted(steps) for sample in steps[step]]
    assert len(stream) == num_steps * batch
    # An epoch's samples stand in whole steps but at its ends: count over all full epochs.
    epochs = len(stream) // num_samples
    assert epochs >= 1
    counts = Counter(stream)
    assert set(counts) == set(range(num_samples))
    assert all(epochs <= count <= epochs + 1 for count in counts.values())


@pytest.mark.parametrize("num_processes", [1, 2])
def test_no_rank_outlives_its_killed_launcher(num_processes, glyphs, tmp_path):
    recipe = write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs,
            tmp_path / "run",
            train__duration={"steps": 100_000},
            telemetry={"log_every": 1},
        ),
    )
    process = start(recipe, tmp_path / "run", num_processes)
    wait_for_step(tmp_path / "run", 2, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == num_processes
    # A second one in the same folder is refused and does no harm.
    answer = run([*KWAY, "train", str(recipe), f"run={tmp_path / 'run'}"])
    assert answer.returncode == 2
    assert "is being trained by another process" in answer.stderr
    assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while any(_is_running(int(pid)) for pid in children):
        assert time.monotonic() < deadline, f"rank processes {children} outlive their launcher"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["head.num_classes=7"], "head.num_classes is 7 and the shards have 13 classes"),
        (["data.shards=/nowhere"], "/nowhere holds no manifest.json"),
        (["data.eval_split=other"], "no split 'other' here: there are train, test"),
        (["trian.global_batch=3"], "trian is not a known key: did you mean train?"),
        (["backbone.config.num_channels=3"], "num_channels is 3 and data.image.channels is 1"),
        (["backbone.config.model_type=nothing"], "backbone.config: "),
        (["head.loss.kind=batch_ce", "train.global_batch=1"], "train.global_batch is 1"),
    ],
)
def test_a_mistake_ends_with_one_line_and_exit_code_2(overrides, message, glyphs, tmp_path, capsys):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    assert main([str(recipe), *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1, error
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_mistake_that_only_the_ranks_see_ends_with_exit_code_2(glyphs, tmp_path):
    recipe = write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run"))
    answer = kway("train", recipe, "head.num_classes=7", "--nproc", "2")
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    assert "head.num_classes is 7 and the shards have 13 classes" in answer.stderr


def test_another_recipe_may_not_go_on_in_a_run_folder(glyphs, tmp_path, capsys):
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run")))
    assert main([recipe]) == 0
    assert main([recipe, "head.loss.kind=bce", "seed=3"]) == 2
    assert "was started with another head.loss.kind, seed" in capsys.readouterr().err
    assert main([recipe, "resume=never"]) == 2
    assert "has checkpoints and resume is never" in capsys.readouterr().err


def test_a_run_cannot_end_before_where_it_is(glyphs, tmp_path, capsys):
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run")))
    assert main([recipe]) == 0
    assert main([recipe, "train.duration.steps=2"]) == 2
    assert "is at step 4 and train.duration is 2 steps" in capsys.readouterr().err


def test_other_shards_in_the_same_place_are_refused(glyphs, tmp_path, capsys):
    shards = tmp_path / "shards"
    shutil.copytree(glyphs, shards)
    recipe = str(write_recipe(tmp_path, glyph_recipe(shards, tmp_path / "run")))
    assert main([recipe]) == 0
    shutil.rmtree(shards)
    write_shards(Glyphs(13, samples=2, size=16), shards, workers=0)
    assert main([recipe, "train.duration.steps=6"]) == 2
    assert "was trained on other shards" in capsys.readouterr().err


def test_a_killed_rank_is_named(glyphs, tmp_path):
    recipe = write_recipe(
        tmp_path,
        glyph_recipe(
            glyphs, tmp_path / "run", train__duration={"steps": 100_000}, telemetry={"log_every": 1}
        ),
    )
    process = subprocess.Popen(
        [*KWAY, "train", str(recipe), "--nproc", "2"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(tmp_path / "run", 2, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "was ended by SIGKILL: out of memory?" in error
    assert "Traceback" not in error


def test_a_finished_run_started_again_changes_nothing(glyphs, tmp_path):
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run")))
    assert main([recipe]) == 0
    before = final_tensors(tmp_path / "run")
    assert main([recipe]) == 0
    after = final_tensors(tmp_path / "run")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_a_loss_that_is_not_finite_stops_before_the_update(glyphs, tmp_path, capsys):
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, tmp_path / "run")))
    assert main([recipe, "optimizer.lr=1e30", "train.duration.steps=20"]) == 1
    assert "the update was not made" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()
