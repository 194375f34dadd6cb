"""Saves in the background, one at a time, with retention and safe replacement."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.timing import resident, restart_high_water_mark
from tests.ranks import rank_world, run_on_ranks
from tests.trainer.checkpoint_mutations import tensor_files
from tests.trainer.checkpoint_runs import save_checkpoint, save_steps, verify_newest
from trainer.checkpoints import (
    CheckpointWriter,
    committed_folders,
    find_checkpoint,
    load_tensors,
    open_checkpoint,
)
from trainer.config import CheckpointConfig

MEGABYTE = 2**20


def writer_of(root: Path, *, start_step: int = 0, **options: Any) -> CheckpointWriter:
    known = {"keep_every_steps", "evaluated_on"}
    writer_options = {key: options.pop(key) for key in known & options.keys()}
    return CheckpointWriter(
        root, CheckpointConfig(**options), rank_world(), start_step=start_step, **writer_options
    )


def steps_in(root: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in committed_folders(root)]


def weight(value: float, numbers: int = 4) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((numbers,), float(value))}


def loaded(root: Path, numbers: int = 4) -> float:
    checkpoint, _ = find_checkpoint(root, rank_world())
    assert checkpoint is not None
    entries = weight(0, numbers)
    load_tensors(checkpoint, entries, rank_world())
    assert entries["weight"].unique().numel() == 1
    return float(entries["weight"][0])


# ------------------------------------------------------------------ in the background


def test_changes_made_after_a_save_has_started_are_not_saved(tmp_path):
    entries = weight(1, 4 * MEGABYTE)
    with writer_of(tmp_path) as writer:
        writer.save(entries, {"step": 1})
        entries["weight"].fill_(2)
    assert loaded(tmp_path, 4 * MEGABYTE) == 1


def test_the_next_save_waits_for_the_previous_one(tmp_path):
    entries = weight(1, 8 * MEGABYTE)
    with writer_of(tmp_path) as writer:
        writer.save(entries, {"step": 1})
        entries["weight"].fill_(2)
        writer.save(entries, {"step": 2})
        writer.finish()
        writer.save(entries, {"step": 3})
    assert loaded(tmp_path, 8 * MEGABYTE) == 2
    assert steps_in(tmp_path) == [2, 3]


def save_between_collectives(root: Path) -> bool:
    world, correct = rank_world(), True
    with CheckpointWriter(root, CheckpointConfig(), world, start_step=0) as writer:
        for step in range(1, 6):
            writer.save(weight(step, MEGABYTE), {"step": step})
            for number in range(100):
                total = torch.full((3,), float(number + world.rank))
                dist.all_reduce(total)
                correct &= bool((total == 2 * number + 1).all())
    return correct


def test_collectives_of_saving_and_training_do_not_interleave(tmp_path):
    assert run_on_ranks(2, save_between_collectives, tmp_path) == [True, True]
    assert loaded(tmp_path, MEGABYTE) == 5


def highest_memory_of_saves(root: Path, in_background: bool, num_bytes: int) -> int:
    """Return the peak additional memory of three saves, in bytes."""
    entries = {f"weight.{number}": torch.ones(num_bytes // 16) for number in range(4)}
    before = restart_high_water_mark()
    with writer_of(root, in_background=in_background) as writer:
        for step in range(1, 4):
            writer.save(entries, {"step": step})
    return resident("VmHWM") - before


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs"
)
@pytest.mark.parametrize(("in_background", "copies"), [(False, 0), (True, 1)])
def test_a_save_needs_one_copy_in_the_background_and_none_in_the_foreground(
    in_background, copies, tmp_path
):
    size = 64 * MEGABYTE
    (needed,) = run_on_ranks(1, highest_memory_of_saves, tmp_path, in_background, size)
    assert (copies - 0.1) * size < needed < (copies + 0.5) * size


# ------------------------------------------------------------------ retention


@pytest.mark.parametrize(("mode", "kept"), [("max", [2, 6]), ("min", [1, 6])])
def test_the_best_checkpoint_is_kept_after_a_restart(mode, kept, tmp_path):
    best = {"measure": "top1", "mode": mode}
    measured = {1: 0.1, 2: 0.9, 3: None, 4: 0.3, 5: float("nan"), 6: 0.5}
    for steps in ([1, 2, 3], [4, 5, 6]):
        with writer_of(tmp_path, keep_last=1, keep_best=best, start_step=steps[0] - 1) as writer:
            for step in steps:
                writer.save(weight(step), {"step": step}, best=measured[step])
    assert steps_in(tmp_path) == kept
    checkpoint = open_checkpoint(tmp_path / "step-00000006", rank_world())
    assert checkpoint.state["best"] == {"measure": "top1", "value": 0.5}


def test_results_of_earlier_versions_are_compared_with_those_of_any_evaluation(tmp_path):
    best = {"measure": "top1", "mode": "max"}
    for step, value, on in ((1, 0.9, None), (2, 0.4, "test 01"), (3, 0.3, "test 01")):
        with writer_of(
            tmp_path, keep_last=1, keep_best=best, start_step=step - 1, evaluated_on=on
        ) as writer:
            writer.save(weight(step), {"step": step}, best=value)
    assert steps_in(tmp_path) == [1, 3]


def test_a_rejected_checkpoint_does_not_count_towards_retention(tmp_path):
    save_steps(tmp_path, [5, 10])
    file = tensor_files(tmp_path / "step-00000010")[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # the size is still correct
    file.write_bytes(content)
    (tmp_path / "step-zzz").mkdir()
    save_steps(tmp_path, [6, 8, 12], {"keep_last": 2}, start_step=5)
    assert steps_in(tmp_path) == [8, 10, 12]
    step, rejected = verify_newest(tmp_path)
    assert (step, rejected) == (12, [])


def test_saving_a_step_again_replaces_its_rejected_checkpoint(tmp_path):
    save_steps(tmp_path, [1, 2])
    tensor_files(tmp_path / "step-00000002")[0].write_bytes(b"x")
    save_steps(tmp_path, [2, 3], start_step=1)
    assert verify_newest(tmp_path) == (3, [])
    assert open_checkpoint(tmp_path / "step-00000002", rank_world()).step == 2
    assert len(list(tmp_path.iterdir())) == 2


# ------------------------------------------------------------------ replacing a step


def test_the_replaced_copy_of_a_step_is_valid_and_gets_its_name_back(tmp_path):
    """The folder is in the state left by a kill between the two renames."""
    save_checkpoint(tmp_path, weight(1), {"step": 7}, rank_world(), keep=1)
    folder = tmp_path / "step-00000007"
    folder.rename(tmp_path / "step-00000007.replaced")
    assert loaded(tmp_path) == 1
    with writer_of(tmp_path, start_step=7, keep_last=2) as writer:
        writer.save(weight(2), {"step": 8})
    assert steps_in(tmp_path) == [7, 8]


def test_the_replaced_copy_of_a_step_is_deleted_when_the_step_is_saved_again(tmp_path):
    """The folder with the final name was rejected, so it is deleted first."""
    save_steps(tmp_path, [7])
    folder = tmp_path / "step-00000007"
    folder.rename(tmp_path / "step-00000007.replaced")
    folder.mkdir()
    assert verify_newest(tmp_path)[0] == 7
    save_steps(tmp_path, [7], start_step=7)
    assert verify_newest(tmp_path) == (7, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_leftovers_from_a_killed_run_are_deleted_at_the_start(tmp_path):
    save_steps(tmp_path, [1])
    for name in ("step-00000002.partial", "step-00000001.replaced.discarded"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tensors").write_bytes(b"x")
    (tmp_path / "notes").mkdir()
    with writer_of(tmp_path, start_step=1):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000001"]


def test_the_files_and_the_folder_are_on_disk_before_the_folder_gets_its_final_name(
    tmp_path, monkeypatch
):
    """Otherwise, a power failure could leave a committed folder with empty files."""
    synced, unsynced, fsync, rename = set(), [], os.fsync, os.rename

    def recorded_fsync(descriptor):
        fsync(descriptor)
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def recorded_rename(source, target):
        folder = Path(source)
        paths = {str(path) for path in (folder, *folder.iterdir())}
        unsynced.append(paths - synced)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save_steps(tmp_path, [1])
    assert unsynced == [set()]
    assert str(tmp_path) in synced  # the new name itself
