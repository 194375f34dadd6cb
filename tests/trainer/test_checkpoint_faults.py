"""Checkpoints and faults: a full disk, a killed process, and files with malicious code."""

import errno
import json
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.addresses import free_port
from tests.file_errors import error as failing
from tests.file_errors import inject
from tests.ranks import RankError, forked, rank_world, run_on_ranks, running, set_rank
from tests.trainer.checkpoint_mutations import seal_file, tensor_files
from tests.trainer.checkpoint_runs import (
    entries_at,
    load_into_zeros,
    save_steps,
    verify_newest,
)
from trainer.checkpoints import CheckpointWriter, find_checkpoint
from trainer.checkpoints import find as verification
from trainer.config import CheckpointConfig
from trainer.faults import Watchdog
from trainer.telemetry.phases import Phases
from trainer.world import open_world

MEGABYTE = 2**20
FILE_OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "open"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root and mount")
    finished = subprocess.run(mount, capture_output=True, text=True, timeout=60)
    if finished.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {finished.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True, timeout=60)


def save_until_full(root: Path, in_background: bool) -> str:
    """Save 1.5 MB per step, so the third step does not fit on the disk."""
    world = rank_world()
    entries = {f"weight.{number}": torch.zeros(48, 1024) for number in range(8)}
    settings = CheckpointConfig(keep_last=9, in_background=in_background)
    writer = CheckpointWriter(root, settings, world, start_step=0)
    try:
        for step in range(1, 9):
            for tensor in entries.values():
                tensor.fill_(step)
            writer.save(entries, {"step": step})
    except OSError as error:
        with writer:
            return f"{step} {error}"
    return "all fitted"


@pytest.mark.parametrize(("world_size", "in_background"), [(1, False), (2, True)])
def test_a_full_disk_is_reported_on_every_rank_and_older_checkpoints_are_intact(
    world_size, in_background, small_disk
):
    root = small_disk / "checkpoints"
    messages = run_on_ranks(world_size, save_until_full, root, in_background)
    assert len(set(messages)) == 1
    # A save in the background raises its error at the start of the next save, which also fails.
    step = 4 if in_background else 3
    assert messages[0].startswith(f"{step} checkpoint {root}/step-{step:08d}")
    assert os.strerror(errno.ENOSPC) in messages[0]
    assert "MB are free at" in messages[0]
    assert "lower checkpoint.keep_last" in messages[0]
    assert messages[0].count("\n") == 0
    assert [path.name for path in sorted(root.iterdir())] == ["step-00000001", "step-00000002"]
    checkpoint, rejected = find_checkpoint(root, rank_world())
    assert checkpoint is not None
    assert (checkpoint.step, rejected) == (2, [])


def save_with_a_limit_on_one_rank(root: Path, in_background: bool) -> list[str]:
    """Return the errors of three saves. Rank 1 cannot write the second one."""
    world, errors = rank_world(), []
    entries = {f"weight.{number}": torch.zeros(MEGABYTE // 4) for number in range(2)}
    settings = CheckpointConfig(keep_last=9, in_background=in_background)
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
def test_a_write_error_on_one_rank_is_raised_on_all_and_the_next_save_works(
    in_background, tmp_path
):
    one, other = run_on_ranks(2, save_with_a_limit_on_one_rank, tmp_path, in_background)
    assert one == other
    assert len(one) == 1
    assert "step-00000002 could not be written on rank 1: File too large" in one[0]
    assert "ulimit -f" in one[0]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000003"]


# ------------------------------------------------------------------ killed


def end_before_change(root: Path, number: int, steps: list[int], start_step: int) -> bool:
    """Save `steps`, but kill this process before the operation with index `number` that opens,
    renames, creates or removes a file under `root`. Returns True if there are fewer operations.
    """
    remaining = number

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal remaining
        if event in FILE_OPERATIONS and str(arguments[0]).startswith(str(root)):
            remaining -= 1
            if remaining < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    settings = CheckpointConfig(in_background=False, keep_last=1)
    with CheckpointWriter(root, settings, rank_world(), start_step=start_step) as writer:
        for step in steps:
            writer.save(entries_at(step, rank_world()), {"step": step})
    return True


@pytest.mark.parametrize(("steps", "start_step"), [([2], 1), ([1], 0)])
def test_a_complete_checkpoint_exists_before_every_file_operation_of_a_save(
    steps, start_step, tmp_path
):
    """Covers saving step 2, which then deletes step 1, and saving step 1 again, which replaces its
    only copy.
    """
    saved = tmp_path / "saved"
    save_steps(saved, [1])
    allowed = {1, steps[0]}
    for number in range(100):
        root = tmp_path / f"checkpoints-{number}"
        shutil.copytree(saved, root)
        try:
            run_on_ranks(1, end_before_change, root, number, steps, start_step)
            ended = False
        except RankError as error:
            if "died" not in str(error):
                raise
            ended = True
        step, rejected = verify_newest(root)
        assert step in allowed, number
        assert rejected == [], number
        save_steps(root, [3], {"keep_last": 1}, start_step=step or 0)
        assert [path.name for path in root.iterdir()] == ["step-00000003"], number
        if not ended:
            break
    assert 15 < number < 99


# ------------------------------------------------------------------ malicious files


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_malicious_checkpoint_does_not_run_code(sealed, tmp_path):
    """The checkpoint contains a pickle or a Python file, which its manifest may or may not list."""
    saved, witness = tmp_path / "saved", tmp_path / "witness"
    save_steps(saved, [1, 2])
    bomb = pickle.dumps(Bomb(witness))
    header = json.dumps({"__metadata__": {"DCP_SHARDING_INFO": bomb.decode("latin-1")}}).encode()
    tensors = "tensors-00001-of-00001.safetensors"
    files = [
        (tensors, bomb),
        (tensors, len(header).to_bytes(8, "little") + header),
        *((name, bomb) for name in ("state.json", "manifest.json", ".metadata", "extra.pt")),
        ("__init__.py", f"import os; os.mkdir({str(witness)!r})".encode()),
    ]
    for number, (name, content) in enumerate(files):
        root = Path(shutil.copytree(saved, tmp_path / str(number)))
        folder = root / "step-00000002"
        (folder / name).write_bytes(content)
        if sealed and name != "manifest.json":
            seal_file(folder, name)
        checkpoint, rejected = find_checkpoint(root, rank_world())
        assert checkpoint is not None
        if checkpoint.step == 2:  # listed in the manifest, but without tensors
            with pytest.raises(ValueError, match=r"unreadable|is missing"):
                load_into_zeros(checkpoint, rank_world())
        else:
            assert str(folder) in rejected[0]
            load_into_zeros(checkpoint, rank_world())
        assert not witness.exists(), name
    pickle.loads(bomb)
    assert witness.exists()


def find_within(timeout_seconds: float, root: Path) -> tuple[int | None, list[str]]:
    world = rank_world()
    file = tensor_files(root / "step-00000002")[0]
    if world.rank == 0:  # opens the file to hash it
        inject("open", str(file), lambda: time.sleep(2 * timeout_seconds))
    phases = Phases(world.device)
    with Watchdog(world, timeout_seconds=timeout_seconds, phases=phases):
        checkpoint, rejected = find_checkpoint(root, world)
    return checkpoint and checkpoint.step, rejected


def test_verification_may_take_longer_than_the_timeout_of_collectives(tmp_path):
    """Rank 0 hashes the only file of the newest checkpoint, while rank 1 waits."""
    save_steps(tmp_path, [1, 2])
    file = tensor_files(tmp_path / "step-00000002")[0]
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    one, other = run_on_ranks(2, find_within, 4.0, tmp_path)
    assert one == other
    step, rejected = one
    assert step == 1
    assert "SHA-256 differs" in rejected[0]


def find_with_faults(root: Path, faults: dict[int, str]) -> tuple[dict[str, int], str]:
    """Find the newest checkpoint while files cannot be opened on the ranks in `faults`. Returns
    how many times this rank opened each file to hash it, and the outcome."""
    world, opened = rank_world(), Counter[str]()

    def fault_of(name: str) -> Callable[[], None]:
        fail = failing(faults[world.rank]) if world.rank in faults else lambda: None
        return lambda: (opened.update([name]), fail())

    for path in tensor_files(root / "step-00000002"):
        inject("open", str(path), fault_of(path.name))
    try:
        checkpoint, rejected = find_checkpoint(root, world)
    except OSError as error:
        return opened, f"{type(error).__name__}: {error}"
    return opened, f"step {checkpoint.step if checkpoint else None}, {len(rejected)} rejected"


def test_each_file_is_hashed_once_by_all_ranks_together(tmp_path):
    run_on_ranks(5, save_steps, tmp_path, [1, 2])
    results = run_on_ranks(2, find_with_faults, tmp_path, {})
    assert [sorted(opened.values()) for opened, _ in results] == [[1] * 3, [1] * 2]
    assert len({*results[0][0], *results[1][0]}) == 5
    assert [outcome for _, outcome in results] == ["step 2, 0 rejected"] * 2


@pytest.mark.parametrize(
    ("faults", "outcome"),
    [
        ({0: "EUCLEAN"}, "step 1, 1 rejected"),
        ({1: "EUCLEAN"}, "step 1, 1 rejected"),
        ({1: "ENOENT"}, "OSError: .*rank 0 can open it, but rank 1 cannot"),
        ({1: "EIO"}, "RetriesExhaustedError: .*delete that checkpoint"),
    ],
)
def test_an_unreadable_file_has_the_same_consequence_on_every_rank(faults, outcome, tmp_path):
    """A checkpoint that only one machine does not see is not rejected, because the run would
    repeat its steps."""
    run_on_ranks(2, save_steps, tmp_path, [1, 2])
    (_, one), (_, other) = run_on_ranks(2, find_with_faults, tmp_path, faults)
    assert one == other
    assert re.match(outcome, one)


def find_and_exit(rank: int, port: int, root: Path, output: Path) -> None:
    """Rank 0 hosts the store and polls it more often than rank 1, which cannot open its file."""
    set_rank(rank, 2, port)
    verification._LONGEST_POLL_SECONDS = 4.0 if rank else 0.01

    def fail_late() -> None:
        time.sleep(1.2)
        failing("ENOENT")()

    with open_world("cpu") as world:
        if rank == 1:
            inject("open", "tensors-00002", fail_late)
        try:
            find_checkpoint(root, world)
        except (OSError, RuntimeError) as error:
            output.write_text(str(error))
        os._exit(0)


def test_a_failed_verification_has_the_same_error_if_the_host_of_the_store_exits(tmp_path):
    run_on_ranks(2, save_steps, tmp_path / "checkpoints", [1])
    outputs = [tmp_path / f"output-{rank}" for rank in range(2)]
    port = free_port("127.0.0.1", 0)
    ranks = [
        forked(find_and_exit, rank, port, tmp_path / "checkpoints", output)
        for rank, output in enumerate(outputs)
    ]
    with running(ranks):
        for process in ranks:
            process.join(60)
    one, other = (output.read_text() for output in outputs)
    assert one == other
    assert "rank 0 can open it, but rank 1 cannot" in one
