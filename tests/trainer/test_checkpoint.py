"""Checkpoints are resharded exactly, are rejected if altered, and are ignored if not committed."""

import base64
import json
import os
import shutil
from pathlib import Path
from random import Random

import pytest
import torch

from tests.ranks import rank_world, run_on_ranks
from tests.trainer.checkpoint_mutations import MUTATIONS, NEWER, OLDER
from tests.trainer.checkpoint_runs import save_checkpoint, save_steps, verify_newest
from trainer.checkpoints import (
    FORMAT_VERSION,
    Checkpoint,
    find_checkpoint,
    load_tensors,
    open_checkpoint,
    restore_random_state,
)
from trainer.checkpoints.load import stored_states
from trainer.world import World


@pytest.mark.parametrize(
    ("saved_on", "loaded_on", "in_background"),
    [
        (1, [3], False),
        (4, [1, 2, 4], True),
        (9, [4], False),
    ],
)
def test_a_checkpoint_loads_bit_identically_at_another_world_size(
    saved_on, loaded_on, in_background, tmp_path
):
    """The entries include uneven and empty shards, scalars, empty tensors, bf16 and booleans."""
    run_on_ranks(saved_on, save_steps, tmp_path, [3], {"in_background": in_background})
    for world_size in loaded_on:
        assert run_on_ranks(world_size, verify_newest, tmp_path) == [(3, [])] * world_size


def save_random(root: Path) -> list[float]:
    world = rank_world()
    torch.manual_seed(100 + world.rank)
    torch.rand(5)
    save_checkpoint(root, {"weight": torch.zeros(1)}, {"step": 2}, world, keep=1)
    return torch.rand(3).tolist()


def draw_after_resume(root: Path, seed: int) -> list[float]:
    world = rank_world()
    checkpoint, _ = find_checkpoint(root, world)
    assert checkpoint is not None
    restore_random_state(checkpoint, world, seed=seed)
    return torch.rand(3).tolist()


def test_every_rank_continues_its_random_sequence(tmp_path):
    drawn = run_on_ranks(2, save_random, tmp_path)
    assert run_on_ranks(2, draw_after_resume, tmp_path, 0) == drawn
    assert drawn[0] != drawn[1]


def test_at_another_world_size_ranks_draw_different_but_reproducible_numbers(tmp_path):
    drawn = run_on_ranks(2, save_random, tmp_path)
    three = run_on_ranks(3, draw_after_resume, tmp_path, 0)
    assert len({tuple(numbers) for numbers in [*three, *drawn]}) == 5
    assert run_on_ranks(3, draw_after_resume, tmp_path, 0) == three
    assert run_on_ranks(3, draw_after_resume, tmp_path, 1) != three


# ------------------------------------------------------------------ one process


@pytest.mark.parametrize(
    ("written_on", "resumed_on", "num_continued"),
    [
        ("cpu", "cpu", 1),
        ("cpu", "cuda", 1),
        ("cuda", "cpu", 1),
        ("cuda", "cuda", 2),
    ],
)
def test_only_generators_whose_state_is_in_the_checkpoint_are_restored(
    written_on, resumed_on, num_continued
):
    cpu, cuda = torch.get_rng_state(), torch.arange(16, dtype=torch.uint8)
    packed = torch.cat([cpu, cuda]) if written_on == "cuda" else cpu
    text = base64.b64encode(packed.numpy().tobytes()).decode()
    state = {"step": 2, "world_size": 1, "random_states": [text]}
    world = World(0, 1, 0, 1, torch.device(resumed_on), None)
    states = stored_states(Checkpoint(Path("unused"), state), world)
    expected = [cpu, cuda][:num_continued]
    assert len(states) == num_continued
    assert all(torch.equal(one, other) for one, other in zip(states, expected, strict=True))


def save_plain(root: Path, step: int, **state: int) -> Path:
    entries = {"weight": torch.full((3, 2), float(step))}
    return save_checkpoint(root, entries, {"step": step, **state}, rank_world(), keep=2)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_on_ranks(2, save_steps, root, [1, 2])
    return root


def test_a_damaged_checkpoint_is_rejected_and_the_previous_one_is_loaded(two_steps, tmp_path):
    draw = Random(0)
    for mutation in MUTATIONS:
        root = tmp_path / mutation.__name__ / "checkpoints"
        shutil.copytree(two_steps, root)
        mutation(draw, root / NEWER, root / OLDER)
        step, (line,) = verify_newest(root)
        assert step == 1, mutation.__name__
        assert str(root / NEWER) in line, mutation.__name__
        assert "\n" not in line, mutation.__name__


def test_every_flipped_bit_is_detected(two_steps, tmp_path):
    folder = tmp_path / NEWER
    shutil.copytree(two_steps / NEWER, folder)
    for prefix in ("manifest.json", "state.json", "tensors"):
        path = next(folder.glob(f"{prefix}*"))
        original = path.read_bytes()
        for position in range(0, len(original), max(1, len(original) // 100)):
            changed = bytearray(original)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            with pytest.raises(ValueError, match=r"checkpoint .*step-00000002"):
                open_checkpoint(folder, rank_world())
        path.write_bytes(original)
    assert open_checkpoint(folder, rank_world()).step == 2


@pytest.mark.parametrize(
    ("version", "message"),
    [(FORMAT_VERSION + 1, "update kway"), (FORMAT_VERSION - 1, "use a new run folder")],
)
def test_the_error_for_an_unsupported_format_contains_the_fix(version, message, tmp_path):
    path = save_plain(tmp_path, 1) / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": version}))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path.parent, rank_world())


def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path):
    path = save_plain(tmp_path, 1) / "state.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="not a regular file"):
        open_checkpoint(path.parent, rank_world())


def find_in(root: Path) -> str:
    try:
        find_checkpoint(root, rank_world())
    except OSError as error:
        return str(error)
    return "found"


def test_an_unreadable_root_raises_an_error_on_every_rank(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    messages = run_on_ranks(2, find_in, tmp_path / "checkpoints")
    assert messages[0] == messages[1]
    assert "are unreadable" in messages[0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"weight": torch.zeros(4, 2)},
            r"weight has shape \[4, 2\] in this run but has shape \[3, 2\]",
        ),
        ({"other": torch.zeros(3, 2)}, r"other has shape \[3, 2\] in this run but does not exist"),
        (
            {"weight": torch.zeros(3, 2, dtype=torch.bfloat16)},
            r"weight is torch\.bfloat16 in this run but torch\.float32 in the checkpoint",
        ),
    ],
)
def test_mismatched_tensors_are_reported(entries, message, tmp_path):
    checkpoint = open_checkpoint(save_plain(tmp_path, 1), rank_world())
    with pytest.raises(ValueError, match=message):
        load_tensors(checkpoint, entries, rank_world())
