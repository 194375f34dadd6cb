"""Checkpoints under faults: a full disk, a killed process, files that would run code."""

import errno
import json
import os
import pickle
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.ranks import rank_world, run_on_ranks
from tests.trainer.checkpoint_kills import ended_before_change, kill_and_resume
from tests.trainer.checkpoint_mutations import digest_of, reseal, tensor_files
from tests.trainer.checkpoint_runs import config, load_into_zeros, newest_is_whole, save_steps
from trainer.checkpoints import CheckpointWriter, committed_folders, find_checkpoint
from trainer.checkpoints.exchange import explain_disk_error

MEGABYTE = 2**20


@contextmanager
def mounted(disk: Path) -> Iterator[None]:
    """A file system of 4 MB at `disk`."""
    disk.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root and mount")
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk"):
        yield tmp_path / "disk"


def save_until_full(root: Path, in_background: bool) -> str:
    """1.5 MB a step: the third one does not fit."""
    world = rank_world()
    entries = {f"weight.{number}": torch.zeros(48, 1024) for number in range(8)}
    settings = config(keep_last=9, in_background=in_background)
    writer = CheckpointWriter(root, settings, world, start_step=0, print_line=lambda _: None)
    try:
        for step in range(1, 9):
            for tensor in entries.values():
                tensor.fill_(step)
            writer.save(entries, {"step": step})
    except OSError as error:
        with writer:
            return f"{step} {error}"
    return "all fitted"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_is_told_on_every_rank_and_older_checkpoints_are_untouched(
    world_size, in_background, small_disk
):
    root = small_disk / "checkpoints"
    messages = run_on_ranks(world_size, save_until_full, root, in_background)
    assert len(set(messages)) == 1
    # In the background the save that fails is heard of at the next one, which is tried once more.
    step = 4 if in_background else 3
    assert messages[0].startswith(f"{step} checkpoint {root}/step-{step:08d}")
    assert os.strerror(errno.ENOSPC) in messages[0]
    assert "MB are free at" in messages[0]
    assert "lower checkpoint.keep_last" in messages[0]
    assert messages[0].count("\n") == 0
    assert [path.name for path in sorted(root.iterdir())] == ["step-00000001", "step-00000002"]
    checkpoint, refused = find_checkpoint(root, rank_world())
    assert checkpoint is not None
    assert (checkpoint.step, refused) == (2, [])


def start_a_writer(root: Path) -> str:
    try:
        CheckpointWriter(root, config(), rank_world(), start_step=0)
    except OSError as error:
        return str(error)
    return "started"


def test_leftovers_that_cannot_be_cleared_away_are_told_on_every_rank(tmp_path):
    with mounted(tmp_path / "step-00000002.partial"):
        one, other = run_on_ranks(2, start_a_writer, tmp_path)
    assert one == other
    assert f"what a run left in {tmp_path} could not be cleared away on rank 0: " in one
    assert run_on_ranks(2, start_a_writer, tmp_path) == ["started"] * 2


def save_with_a_limit_on_one_rank(root: Path, in_background: bool) -> list[str]:
    """Errors of three saves, the second of which rank 1 cannot write."""
    world, errors = rank_world(), []
    entries = {f"weight.{number}": torch.zeros(MEGABYTE // 4) for number in range(2)}
    settings = config(keep_last=9, in_background=in_background)
    with CheckpointWriter(root, settings, world, start_step=0) as writer:
        for step in (1, 2, 3):
            limited = world.rank == 1 and step == 2
            limit = 1000 if limited else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                writer.save(entries, {"step": step})
                writer.finish()
            except OSError as error:
                errors.append(str(error))
    return errors


@pytest.mark.parametrize("in_background", [False, True])
def test_what_one_rank_cannot_write_is_an_error_on_all_and_the_next_save_works(
    in_background, tmp_path
):
    one, other = run_on_ranks(2, save_with_a_limit_on_one_rank, tmp_path, in_background)
    assert one == other
    assert len(one) == 1
    assert "step-00000002 could not be written on rank 1: File too large" in one[0]
    assert "ulimit -f" in one[0]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000003"]


def test_a_failure_in_the_background_is_told_once_before_the_next_save(tmp_path):
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    with CheckpointWriter(root, config(), rank_world(), start_step=0) as writer:
        assert writer.failures() == []
        writer.save({"weight": torch.zeros(1)}, {"step": 1})
        while not (told := writer.failures()):
            pass
        assert [(trouble.step, trouble.is_lost) for trouble in told] == [(1, True)]
        assert "step-00000001 could not be written" in told[0].reason
        assert writer.failures() == []
        with pytest.raises(OSError, match="could not be written"):
            writer.finish()


def test_other_errors_of_the_disk_have_remedies_too(tmp_path):
    for number, remedy in ((errno.EROFS, "writable"), (errno.EIO, "check the disk")):
        line = explain_disk_error(OSError(number, os.strerror(number), "x"), tmp_path / "not yet")
        assert remedy in line
        assert f"are free at {tmp_path}" in line
    assert explain_disk_error(OSError("2 bytes missing"), tmp_path).startswith("2 bytes missing; ")


# ------------------------------------------------------------------ killed


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_kill_at_a_random_instant_the_newest_committed_checkpoint_is_whole(
    world_size, tmp_path
):
    newest = kill_and_resume(tmp_path, world_size, seed=world_size, count=3)
    assert newest == sorted(newest)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_after_20_kills_the_newest_committed_checkpoint_is_whole(world_size, tmp_path):
    assert kill_and_resume(tmp_path, world_size, seed=10 + world_size, count=20)[-1] > 0


@pytest.mark.parametrize(("steps", "start_step"), [([2], 1), ([1], 0)])
def test_before_whichever_file_operation_a_save_ends_a_whole_checkpoint_is_there(
    steps, start_step, tmp_path
):
    """Of step 2, after which step 1 goes, and of step 1 once more: over its only copy."""
    saved = tmp_path / "saved"
    save_steps(saved, [1])
    allowed = {1, steps[0]}
    for number in range(100):
        root = tmp_path / f"checkpoints-{number}"
        shutil.copytree(saved, root)
        ended = ended_before_change(root, number, steps, start_step)
        step, refused = newest_is_whole(root)
        assert step in allowed, number
        assert refused == [], number
        save_steps(root, [3], {"keep_last": 1}, start_step=step or 0)
        assert [path.name for path in root.iterdir()] == ["step-00000003"], number
        if not ended:
            break
    assert 15 < number < 99


# ------------------------------------------------------------------ poisoned


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


POISONED = [
    "tensors-00001-of-00001.safetensors",
    "tensors-00002-of-00002.safetensors",
    "state.json",
    "manifest.json",
    ".metadata",
    "__0_0.distcp",
    "extra.pt",
    "__init__.py",
]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", POISONED)
def test_a_poisoned_checkpoint_runs_nothing(name, sealed, tmp_path):
    """Whether the manifest lists the file or not: it is a pickle, and Python that does the same."""
    save_steps(tmp_path, [1, 2])
    folder, witness = tmp_path / "step-00000002", tmp_path / "witness"
    content = pickle.dumps(Bomb(witness))
    if name.endswith(".py"):
        content = f"import os; os.mkdir({str(witness)!r})".encode()
    if sealed and name != "manifest.json":
        (folder / name).write_bytes(content)
        reseal(folder, lambda made: made["files"].update({name: digest_of(folder / name)}))
    else:
        (folder / name).write_bytes(content)
    checkpoint, refused = find_checkpoint(tmp_path, rank_world())
    assert checkpoint is not None
    if checkpoint.step == 2:  # a tensor file that is sealed and no tensor file: nobody's write
        with pytest.raises(ValueError, match="is unreadable"):
            load_into_zeros(checkpoint, rank_world())
    else:
        assert str(folder) in refused[0]
        load_into_zeros(checkpoint, rank_world())
    assert not witness.exists()


def test_the_bomb_of_these_tests_goes_off(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "witness")))
    assert (tmp_path / "witness").exists()


def test_a_safetensors_header_with_a_pickle_in_it_runs_nothing(tmp_path):
    save_steps(tmp_path, [1])
    folder = tmp_path / "step-00000001"
    file = tensor_files(folder)[0]
    bomb = pickle.dumps(Bomb(tmp_path / "witness")).decode("latin-1")
    header = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": bomb}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    reseal(folder, lambda made: made["files"].update({file.name: digest_of(file)}))
    checkpoint, _ = find_checkpoint(tmp_path, rank_world())
    assert checkpoint is not None
    with pytest.raises(ValueError, match=r"unreadable|no such tensor"):
        load_into_zeros(checkpoint, rank_world())
    assert not (tmp_path / "witness").exists()
    assert committed_folders(tmp_path) == [folder]
