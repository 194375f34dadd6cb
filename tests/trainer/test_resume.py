"""Resuming before the first update, after a rejected start, in fp16 and with new settings."""

import errno
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.loading.batch import Cursor
from tests.ranks import run_on_ranks
from tests.shards import glyph_recipe
from tests.system.processes import write_recipe
from tests.system.runs import read_lines
from tests.trainer.checkpoint_mutations import reseal
from tests.trainer.checkpoint_runs import save_checkpoint
from tests.trainer.training import full_entries, started, take_steps
from trainer.__main__ import main
from trainer.checkpoints import find_checkpoint
from trainer.checkpoints.entries import training_entries
from trainer.checkpoints.pieces import write_shard
from trainer.recipe import dump_recipe, load_recipe
from trainer.run.folder import RunFolder
from trainer.run.state import TrainState, provenance, resume
from trainer.schedules import RunLength
from trainer.task import Task
from trainer.telemetry.jsonl import Event


def state_of(task, step: int) -> TrainState:
    return TrainState(
        step=step,
        cursor=Cursor(0),
        tree=task.head.tree_digest(),
        data="data",
        tokenizer=None,
        loss_scale=task.loss_scale.to_json(),
    )


def save(folder: RunFolder, task: Task, state: TrainState) -> None:
    save_checkpoint(folder.checkpoints, training_entries(task), state.to_json(), task.world, keep=1)


def resume_run(folder: RunFolder, task: Task) -> tuple[TrainState, list[Event]]:
    start = replace(state_of(task, 0), origin=provenance(task.recipe))
    found = find_checkpoint(folder.checkpoints, task.world)
    return resume(folder, task, start, task.world, found=found, length=RunLength(9, 9, 1))


def test_a_run_resumes_from_before_its_first_update(glyphs, tmp_path):
    """If every step so far was skipped, the optimizer has no moments yet."""
    folder, task = RunFolder(tmp_path), started(glyphs)
    state = state_of(task, 1)
    save(folder, task, state)
    again = started(glyphs)
    state, notices = resume_run(folder, again)
    assert (state.step, notices) == (1, [])
    assert take_steps(again, 2) == take_steps(task, 2)


def test_a_run_resumes_with_its_weights_moments_and_loss_scale(glyphs, tmp_path):
    folder, task = RunFolder(tmp_path), started(glyphs, train__precision="fp16")
    take_steps(task, 2)
    task.loss_scale.restore({"value": 8.0, "good_steps": 3})
    state, expected = state_of(task, 2), full_entries(task)
    save(folder, task, state)
    again = started(glyphs, train__precision="fp16")
    resume_run(folder, again)
    assert again.loss_scale.to_json() == {"value": 8.0, "good_steps": 3}
    found = full_entries(again)
    assert found.keys() == expected.keys()
    assert any(value.any() for name, value in found.items() if name.startswith("optimizer."))
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def lines(run: Path, event: str) -> list[int]:
    records = read_lines(run / "metrics.jsonl")
    return [record["step"] for record in records if record["event"] == event]


def test_a_rejected_start_does_not_change_the_stored_recipe(glyphs, tmp_path, capsys):
    run = tmp_path / "run"
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, run)))
    assert main([recipe]) == 0
    stored = (run / "recipe.yaml").read_text()
    assert main([recipe, "train.ema.decay=0.9", "train.duration.steps=6"]) == 2
    assert "was trained without train.ema" in capsys.readouterr().err
    assert (run / "recipe.yaml").read_text() == stored


def changed(run: Path) -> dict[str, tuple[str, str]]:
    """Return the old and new values in the `changed` events of a run, keyed by setting."""
    records = read_lines(run / "metrics.jsonl")
    return {r["key"]: (r["old"], r["new"]) for r in records if r["event"] == "changed"}


def test_new_settings_are_printed_and_recorded_on_resume(glyphs, tmp_path, capsys):
    run = tmp_path / "run"
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, run)))
    assert main([recipe]) == 0
    assert main([recipe]) == 0
    assert "changed" not in capsys.readouterr().out
    assert changed(run) == {}

    others = ["optimizer.lr=0.1", "train.clip_norm=2", "schedule.kind=linear"]
    longer = "train.duration.steps=6"
    # This is the state after a resumed run was killed before it saved its next checkpoint.
    (run / "recipe.yaml").write_text(dump_recipe(load_recipe(Path(recipe), [*others, longer])))
    assert main([recipe, *others, longer]) == 0
    assert changed(run) == {
        "optimizer.lr": ("0.05", "0.1"),
        "learning_rate": ("0.00732 at step 4", "0.0333"),
        "train.clip_norm": ("null", "2.0"),
        "schedule.kind": ("cosine", "linear"),
        "train.duration.steps": ("4", "6"),
    }
    assert "changed on resume: optimizer.lr: 0.05 -> 0.1\n" in capsys.readouterr().out
    assert main([recipe, *others, longer]) == 0  # the checkpoint of step 6 contains them
    assert "changed" not in capsys.readouterr().out


def test_every_evaluation_is_recorded_once_and_the_best_checkpoint_is_kept(glyphs, tmp_path):
    """Evaluations and checkpoints have different intervals, and a save follows each evaluation."""
    run = tmp_path / "run"
    changes = {
        "train__duration": {"steps": 5},
        "evaluation": {"every": {"steps": 2}},
        "checkpoint": {"every": {"steps": 3}, "keep_last": 1, "keep_best": {"measure": "top1"}},
    }
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, run, **changes)))
    assert main([recipe]) == 0
    assert main([recipe]) == 0
    assert lines(run, "evaluation") == [2, 4, 5]
    results = {
        int(path.stem[5:]): json.loads(path.read_text()) for path in run.glob("evaluations/*.json")
    }
    best = max(results, key=lambda step: (results[step]["top1"], step))
    kept = {int(path.name[5:]) for path in (run / "checkpoints").iterdir()}
    assert 5 in kept
    assert max(results[step]["top1"] for step in kept) == results[best]["top1"]


def test_results_on_different_evaluation_splits_are_not_compared(glyphs, tmp_path, capsys):
    """The result of step 1, on the old split, is higher than any accuracy."""
    run = tmp_path / "run"
    changes = {
        "train__duration": {"steps": 1},
        "evaluation": {"every": {"steps": 1}},
        "checkpoint": {"every": {"steps": 1}, "keep_last": 1, "keep_best": {"measure": "top1"}},
    }
    recipe = str(write_recipe(tmp_path, glyph_recipe(glyphs, run, **changes)))
    assert main([recipe]) == 0
    reseal(run / "checkpoints/step-00000001", lambda content: content["best"].update(value=9.0))
    assert main([recipe, "train.duration.steps=2"]) == 0
    kept = run / "checkpoints"
    assert [path.name[-1] for path in sorted(kept.iterdir())] == ["1", "2"]
    assert "version.evaluation" not in capsys.readouterr().out
    assert main([recipe, "train.duration.steps=3", "data.eval_split=train"]) == 0
    assert [path.name[-1] for path in sorted(kept.iterdir())] == ["3"]
    assert "version.evaluation: test " in capsys.readouterr().out


def test_a_lost_checkpoint_is_reported_and_the_next_one_is_written(
    glyphs, tmp_path, capsys, monkeypatch
):
    run, failures = tmp_path / "run", [OSError(errno.ENOSPC, "no space")]

    def write(*arguments):
        if failures:
            raise failures.pop()
        return write_shard(*arguments)

    monkeypatch.setattr("trainer.checkpoints.commit.write_shard", write)
    changes = {"train__duration": {"steps": 40}, "checkpoint": {"every": {"steps": 20}}}
    assert main([str(write_recipe(tmp_path, glyph_recipe(glyphs, run, **changes)))]) == 0
    assert lines(run, "lost_checkpoint") == [20]
    assert lines(run, "checkpoint") == [40]
    output = capsys.readouterr().out
    assert output.count("step-00000020 could not be written: No space left on device") == 1


def local_statistics(shards: Path, strategy: str) -> dict[str, np.ndarray]:
    task = started(shards, backbone__batch_norm="local", train__strategy={"kind": strategy})
    take_steps(task, 2)
    found = {name: buffer.numpy().copy() for name, buffer in task.backbone.named_buffers()}
    task.strategy.close()
    return found


def test_local_batch_norm_statistics_are_copied_from_the_first_rank(glyphs):
    first, second = run_on_ranks(2, local_statistics, glyphs, "fsdp")
    assert any(value.std() > 0 for name, value in first.items() if "running_mean" in name)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)
